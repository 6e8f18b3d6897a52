"""A case: a small program with a bug, and what the scripted debug agent knows and believes about it.

cases/<name>/issue.md      what the agent is asked to mend
cases/<name>/program/      the program and the tests that the agent can see
cases/<name>/hidden/       tests that only the judge runs
cases/<name>/case.yaml     where the bug lies, why, and two right fixes and a wrong one
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "cases"


@dataclass(frozen=True, slots=True)
class Edit:
    """Lines of a file, and new ones in their place. `misremembered` is what an agent may wrongly take for `old`."""

    old: str
    new: str
    misremembered: str | None = None


@dataclass(frozen=True, slots=True)
class Fix:
    """A change to the case's module: what the agent means to do, and its edits in order."""

    plan: str
    edits: tuple[Edit, ...]

    def applied_to(self, text: str) -> str:
        """The module's text with every edit made. Raises ValueError where an old text is not there exactly once."""
        for edit in self.edits:
            if text.count(edit.old) != 1:
                raise ValueError(f"{edit.old!r} is there {text.count(edit.old)} times, not once")
            text = text.replace(edit.old, edit.new)
        return text


@dataclass(frozen=True, slots=True)
class Case:
    """One case. `module` is the faulty file, `symbol` a word to search for in it, `reproduce` a script that shows the
    bug, `cause` its explanation. `other` mends it in another way (or nearly), `wrong` does not."""

    name: str
    folder: Path
    issue: str
    module: str
    symbol: str
    reproduce: str
    cause: str
    right: Fix
    other: Fix
    wrong: Fix

    @property
    def program(self) -> Path:
        return self.folder / "program"

    @property
    def hidden_tests(self) -> Path:
        return self.folder / "hidden"

    @property
    def source(self) -> str:
        return (self.program / self.module).read_text(encoding="utf-8")


def load_cases() -> list[Case]:
    """Every case, by name."""
    return [_load(folder) for folder in sorted(FOLDER.iterdir()) if (folder / "case.yaml").is_file()]


def _load(folder: Path) -> Case:
    fields: dict[str, Any] = yaml.safe_load((folder / "case.yaml").read_text(encoding="utf-8"))
    for name in ("right", "other", "wrong"):
        edits = tuple(Edit(**edit) for edit in fields[name]["edits"])
        fields[name] = Fix(fields[name]["plan"], edits)
    issue = (folder / "issue.md").read_text(encoding="utf-8").strip()
    return Case(name=folder.name, folder=folder, issue=issue, **fields)
