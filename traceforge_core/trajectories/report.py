"""The counts of an ingest: found = read + quarantined + duplicates, and what they are made of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

CONFLICTS_SHOWN = 100


@dataclass(slots=True)
class Entry:
    """What is counted of one trajectory. `digest` is equal for trajectories that say the same."""

    digest: str
    source: str
    format: str
    outcome: str | None
    exit_status: str | None
    turns: int
    turns_without_action: int
    infrastructure: bool
    left_out: dict[str, int]


@dataclass(slots=True)
class Report:
    """Built entry by entry, in reading order."""

    entries: Counter[str] = field(default_factory=Counter)
    by_format: Counter[str] = field(default_factory=Counter)
    by_outcome: Counter[str] = field(default_factory=Counter)
    by_exit: Counter[str] = field(default_factory=Counter)
    by_reason: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    conflicts: list[dict[str, str]] = field(default_factory=list)
    seen: dict[bytes, tuple[str, str | None]] = field(default_factory=dict)

    def add(self, entry: Entry) -> bool:
        """Count one trajectory. Returns False where the same was there before: a duplicate, to be left out."""
        digest = bytes.fromhex(entry.digest)
        there = self.seen.get(digest)
        if there is not None:
            self.entries["duplicates"] += 1
            if None not in (there[1], entry.outcome) and there[1] != entry.outcome:
                note = f"{entry.outcome}, but its content is the same as that of {there[0]}, which is {there[1]}"
                self.conflicts.append({"source": entry.source, "conflict": note})
            return False
        self.seen[digest] = (entry.source, entry.outcome)
        self.entries["read"] += 1
        self.entries["turns"] += entry.turns
        self.entries["turns_without_action"] += entry.turns_without_action
        self.entries["infrastructure_ends"] += entry.infrastructure
        self.by_format[entry.format] += 1
        self.by_outcome[entry.outcome or "unknown"] += 1
        self.by_exit[entry.exit_status or "unknown"] += 1
        self.left_out.update(entry.left_out)
        return True

    def figures(self) -> dict[str, Any]:
        """The counts, ready for `report.json`."""
        quarantined = self.by_reason.total()
        return {
            "found": self.entries["read"] + quarantined + self.entries["duplicates"],
            "read": self.entries["read"],
            "quarantined": quarantined,
            "duplicates": self.entries["duplicates"],
            "by_format": dict(sorted(self.by_format.items())),
            "by_outcome": dict(sorted(self.by_outcome.items())),
            "by_exit": dict(self.by_exit.most_common(50)),
            "by_reason": dict(self.by_reason.most_common()),
            "left_out": dict(self.left_out.most_common()),
            "turns": self.entries["turns"],
            "turns_without_action": self.entries["turns_without_action"],
            "infrastructure_ends": self.entries["infrastructure_ends"],
            "outcome_conflicts": len(self.conflicts),
            "conflicts": self.conflicts[:CONFLICTS_SHOWN],
        }
