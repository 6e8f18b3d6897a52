"""Old runs: what is there, what it takes, and which may go.

    held = survey(Path("runs"))                                        # every run, oldest first
    plan = plan_pruning(held, older_than_days=30, total_bytes=200 << 30)
    prune(Path("runs"), plan)

Files that runs share are hard links, so a run's size is not what removing it frees; both are said. Never removed: the
newest run, the newest whose model is trained, the newest whose strategies agree with the oracle, and any that a process
is at work on.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import Run, list_runs
from traceforge_core.runs.disk import in_units
from traceforge_core.stages import STAGES
from traceforge_core.training.job import TRAINING

DAY = 86400.0
GOING = ".going-"  # a run on its way out has this in front of its name, and is no run any more

Blocks = dict[tuple[int, int], tuple[int, int, int]]  # a file on disk: links to it here, links to it at all, bytes


@dataclass(frozen=True, slots=True)
class Held:
    """A run as housekeeping sees it. `days` since it was last worked on; `verdict` None where nothing was compared;
    `kept` says why it is never removed, None where it may be."""

    run: Run
    days: float
    bytes: int
    stages: tuple[str, ...]
    verdict: str | None
    kept: str | None
    blocks: Blocks = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run.run_id,
            "path": str(self.run.path),
            "days": round(self.days, 2),
            "bytes": self.bytes,
            "stages": list(self.stages),
            "verdict": self.verdict,
            "kept": self.kept,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """Runs to remove, oldest first; what that frees; what is then left in all; and what could not be kept to."""

    going: tuple[Held, ...]
    freed: int
    left: int
    note: str | None = None


def survey(runs_dir: Path) -> list[Held]:
    """Every run of the folder, oldest first. What cannot be read counts as nothing, and harms no other run."""
    runs = list_runs(runs_dir)
    finished = {run.run_id: tuple(name for name in STAGES if run.result(name)) for run in runs}
    verdicts = {run.run_id: _verdict(run) for run in runs}
    kept = {run.run_id: "a process is at work on it" for run in runs if run.is_at_work()}
    agreed = [run for run in runs if verdicts[run.run_id] == "pass"]
    trained = [run for run in runs if any(name in TRAINING for name in finished[run.run_id])]
    for why, those in (
        ("the newest that agrees with the oracle", agreed),
        ("the newest with a trained model", trained),
        ("the newest run", runs),
    ):
        for run in those[-1:]:
            kept[run.run_id] = f"{kept[run.run_id]}; {why}" if run.run_id in kept else why
    held = []
    for run in runs:
        blocks = _blocks(run.path)
        size = sum(size for _, _, size in blocks.values())
        days = max(0.0, time.time() - _last_used(run)) / DAY
        held.append(Held(run, days, size, finished[run.run_id], verdicts[run.run_id], kept.get(run.run_id), blocks))
    return held


def plan_pruning(held: Sequence[Held], *, older_than_days: float | None = None, total_bytes: int | None = None) -> Plan:
    """What to remove: runs older than so many days, then the oldest until all together take no more than `total_bytes`.

    Raises TraceForgeError where neither is given.
    """
    if older_than_days is None and total_bytes is None:
        raise TraceForgeError("Say what may go: --older-than DAYS, --total-gib GIB, or both.")
    going = [each for each in held if _may_go(each) and older_than_days is not None and each.days > older_than_days]
    for each in held:
        if total_bytes is None or on_disk(held) - freed(going) <= total_bytes:
            break
        if _may_go(each) and each not in going:
            going.append(each)
    going.sort(key=held.index)
    left = on_disk(held) - freed(going)
    note = None
    if total_bytes is not None and left > total_bytes:
        note = f"{in_units(left)} are left, more than asked for: the runs that are left are those never removed."
    return Plan(tuple(going), freed(going), left, note)


def prune(runs_dir: Path, plan: Plan) -> list[str]:
    """Remove the runs of a plan, and what an interrupted pruning left. Returns the ids of the runs removed.

    A run vanishes from the list at once, whole. One that a process took up meanwhile stays.
    """
    removed = []
    for each in plan.going:
        with contextlib.suppress(TraceForgeError), each.run.lock():
            each.run.path.rename(each.run.path.with_name(GOING + each.run.run_id))
            removed.append(each.run.run_id)
    for folder in runs_dir.glob(f"{GOING}*"):
        shutil.rmtree(folder)
    return removed


def on_disk(held: Sequence[Held]) -> int:
    """Bytes that runs take together; what they share counts once."""
    merged: Blocks = {}
    for each in held:
        merged |= each.blocks
    return sum(size for _, _, size in merged.values())


def freed(going: Sequence[Held]) -> int:
    """Bytes that removing these runs frees: of files to which no other run has a link."""
    links: Counter[tuple[int, int]] = Counter()
    for each in going:
        links.update({key: here for key, (here, _, _) in each.blocks.items()})
    blocks = {key: block for each in going for key, block in each.blocks.items()}
    return sum(size for key, (_, all_links, size) in blocks.items() if links[key] >= all_links)


def _may_go(each: Held) -> bool:
    return each.kept is None


def _blocks(folder: Path) -> Blocks:
    found: Blocks = {}
    for path in folder.rglob("*"):
        try:
            stat = path.lstat()
        except OSError:
            continue
        key = (stat.st_dev, stat.st_ino)
        here = found[key][0] + 1 if key in found else 1
        links = stat.st_nlink if path.is_file() and not path.is_symlink() else 1
        found[key] = (here, links, stat.st_blocks * 512)
    return found


def _last_used(run: Run) -> float:
    times = [path.stat().st_mtime for name in ("config.json", "invocation.json") if (path := run.path / name).is_file()]
    return max(times)


def _verdict(run: Run) -> str | None:
    result = run.result("compare")
    verdict = result.figures.get("verdict") if result else None
    return str(verdict) if verdict is not None else None
