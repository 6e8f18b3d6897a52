"""The stage `ingest`: a folder of trajectory files to canonical trajectories, with exact counts.

    figures = ingest(config, {}, out_dir)

Writes `trajectories/part-*.parquet` (store.py), `quarantine.jsonl` (what was set aside: source, reason, detail) and
`report.json`. Counted in trajectories, found = read + quarantined + duplicates; a file that cannot be read counts as
one. Files are read one by one; memory does not grow with the corpus, but for a hash and a few names of each
trajectory.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import orjson

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import write_json
from traceforge_core.trajectories import outcomes
from traceforge_core.trajectories.model import Trajectory
from traceforge_core.trajectories.parsing import DATA_SUFFIXES
from traceforge_core.trajectories.reading import Corpus, Quarantined, read_file, survey
from traceforge_core.trajectories.store import FOLDER, TrajectoryWriter, encode_messages

log = logging.getLogger(__name__)

CONFLICTS_SHOWN = 100


def ingest(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> dict[str, Any]:
    """Read the corpus of `config.ingest` into `out_dir`. Returns the counts. Raises TraceForgeError where there is
    nothing to read."""
    corpus = survey(corpus_folder(config.ingest.path))
    if not corpus.files and not corpus.unreadable:
        raise TraceForgeError(
            f"No trajectory files in {corpus.root}: {_seen(corpus)}. Set ingest.path to a folder that holds some "
            f"({', '.join(DATA_SUFFIXES)}, also packed as .gz or .zst)."
        )
    tally = Tally()
    verdicts = _collect_outcomes(corpus, config.ingest.outcomes, tally)
    with TrajectoryWriter(out_dir / FOLDER) as writer, (out_dir / "quarantine.jsonl").open("wb") as quarantine:
        for problem in corpus.unreadable:
            _set_aside(problem, quarantine, tally)
        for path in corpus.files:
            for item in read_file(corpus.root, path):
                if isinstance(item, Quarantined):
                    _set_aside(item, quarantine, tally)
                    continue
                messages = encode_messages(item.messages)
                digest = content_hash(item, messages)
                _label(item, path, verdicts, tally)
                if tally.is_duplicate(item, digest):
                    continue
                item.trajectory_id = identify(item, digest)
                writer.write(item, messages)
                tally.count(item)
    report = tally.report(corpus)
    write_json(out_dir / "report.json", report)
    if not report["read"]:
        log.warning(
            "None of the %d things found in %s could be read; see quarantine.jsonl", report["found"], corpus.root
        )
    return report


def corpus_folder(path: str) -> Path:
    """The folder or file that `ingest.path` means; `samples` is what TraceForge ships. Raises TraceForgeError."""
    if path == "samples":
        folder = Path(str(resources.files("traceforge_core") / "samples" / "data"))
    else:
        folder = Path(path).expanduser()
    if not folder.exists():
        raise TraceForgeError(
            f"There is no folder or file {folder} (ingest.path). Give the path of your trajectories, or `samples`."
        )
    return folder


def content_hash(trajectory: Trajectory, messages: bytes) -> bytes:
    """Equal for trajectories that say the same: same messages, same tools."""
    digest = hashlib.blake2b(messages, digest_size=16)
    digest.update(b"\0" + orjson.dumps(trajectory.tools, option=orjson.OPT_SORT_KEYS))
    return digest.digest()


def identify(trajectory: Trajectory, digest: bytes) -> str:
    """A name that is unique in the corpus and the same whenever the same file is read again."""
    own = hashlib.blake2b(trajectory.source.encode() + b"\0" + digest, digest_size=6).hexdigest()
    return f"{trajectory.case}--{own}"


@dataclass(slots=True)
class Tally:
    """The counts of an ingest."""

    read: int = 0
    duplicates: int = 0
    turns: int = 0
    turns_without_action: int = 0
    by_format: Counter[str] = field(default_factory=Counter)
    by_outcome: Counter[str] = field(default_factory=Counter)
    by_exit: Counter[str] = field(default_factory=Counter)
    by_reason: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    infrastructure: int = 0
    conflicts: list[dict[str, str]] = field(default_factory=list)
    outcome_files: dict[str, dict[str, int]] = field(default_factory=dict)
    seen: dict[bytes, tuple[str, str | None]] = field(default_factory=dict)

    def is_duplicate(self, trajectory: Trajectory, digest: bytes) -> bool:
        there = self.seen.get(digest)
        if there is None:
            self.seen[digest] = (trajectory.source, trajectory.outcome)
            return False
        self.duplicates += 1
        if None not in (there[1], trajectory.outcome) and there[1] != trajectory.outcome:
            self.conflicts.append(
                {"source": trajectory.source, "conflict": f"same content as {there[0]}, which is {there[1]}"}
            )
        return True

    def count(self, trajectory: Trajectory) -> None:
        self.read += 1
        self.by_format[trajectory.format] += 1
        self.by_outcome[trajectory.outcome or "unknown"] += 1
        self.by_exit[trajectory.exit_status or "unknown"] += 1
        self.left_out.update(trajectory.left_out)
        for message in trajectory.messages:
            if message.role == "assistant":
                self.turns += 1
                self.turns_without_action += not message.actions

    def report(self, corpus: Corpus) -> dict[str, Any]:
        quarantined = sum(self.by_reason.values())
        return {
            "found": self.read + quarantined + self.duplicates,
            "read": self.read,
            "quarantined": quarantined,
            "duplicates": self.duplicates,
            "files": len(corpus.files),
            "by_format": dict(sorted(self.by_format.items())),
            "by_outcome": dict(sorted(self.by_outcome.items())),
            "by_exit": dict(self.by_exit.most_common()),
            "by_reason": dict(self.by_reason.most_common()),
            "left_out": dict(self.left_out.most_common()),
            "turns": self.turns,
            "turns_without_action": self.turns_without_action,
            "infrastructure_ends": self.infrastructure,
            "outcome_files": self.outcome_files,
            "outcome_conflicts": len(self.conflicts),
            "conflicts": self.conflicts[:CONFLICTS_SHOWN],
            "other_files": dict(corpus.other_files.most_common()),
        }


def _collect_outcomes(corpus: Corpus, more: list[str], tally: Tally) -> outcomes.Outcomes:
    verdicts = outcomes.Outcomes(corpus.files)
    found = dict(corpus.outcome_files)
    for name in more:
        path = Path(name).expanduser().resolve()
        if not path.exists():
            raise TraceForgeError(
                f"There is no outcome file or folder {path} (ingest.outcomes). Mend or remove the entry."
            )
        outside = survey(path) if path.is_dir() else _single(path)
        if not outside.outcome_files:
            raise TraceForgeError(
                f"{path} (ingest.outcomes) holds no outcomes that TraceForge knows: SWE-bench run reports "
                "(resolved_ids, ...) or per-instance reports."
            )
        found |= {(outside.root / file).as_posix(): claims for file, claims in outside.outcome_files.items()}
    for source, claims in found.items():
        verdicts.add(source, claims)
        tally.outcome_files[source] = dict(Counter(claim.label for claim in claims))
    verdicts.settle(corpus.files)
    return verdicts


def _single(path: Path) -> Corpus:
    whole = survey(path.parent)
    return Corpus(path.parent, outcome_files={k: v for k, v in whole.outcome_files.items() if k == path.name})


def _label(trajectory: Trajectory, path: str, verdicts: outcomes.Outcomes, tally: Tally) -> None:
    """Give a trajectory its outcome, from what the files say and what its own row says."""
    decision = verdicts.decide(trajectory.case, trajectory.run, path)
    conflict = decision.conflict
    if decision.label and trajectory.outcome and decision.label != trajectory.outcome:
        conflict = f"{decision.label} in {decision.source}; {trajectory.outcome} in {trajectory.outcome_source}"
    if conflict:
        tally.conflicts.append({"source": trajectory.source, "conflict": conflict})
        trajectory.outcome = trajectory.outcome_source = None
    elif decision.label:
        trajectory.outcome, trajectory.outcome_source = decision.label, decision.source
    if outcomes.is_infrastructure(trajectory.exit_status) or not trajectory.turns:
        tally.infrastructure += 1
        trajectory.outcome = trajectory.outcome_source = None


def _set_aside(item: Quarantined, file: Any, tally: Tally) -> None:
    row = {"source": item.source, "reason": item.reason, "detail": item.detail}
    file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    tally.by_reason[item.reason] += 1


def _seen(corpus: Corpus) -> str:
    if corpus.outcome_files or corpus.other_files:
        return f"{len(corpus.outcome_files)} outcome files and {corpus.other_files.total()} others are there"
    return "it is empty"
