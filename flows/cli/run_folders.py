"""What `traceforge runs` answers, as a JSON-able record and as text: a list, a comparison, or what pruning removes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.cli.terminal import columns
from traceforge_core.runs import Run
from traceforge_core.runs.disk import in_units
from traceforge_core.runs.housekeeping import on_disk, plan_pruning, prune, survey
from traceforge_core.runs.side_by_side import differences

Answer = tuple[dict[str, Any], str]
WIDTH = 28


def listed(runs_dir: Path) -> Answer:
    """Every run, oldest first, with its age, size, stages and verdict."""
    held = survey(runs_dir)
    if not held:
        return {"runs": [], "bytes": 0}, f"There are no runs in {runs_dir}."
    lines = [f"{'run':<24} {'last used':>12} {'size':>11}   {'verdict':<10} stages"]
    lines += [
        f"{each.run.run_id:<24} {_ago(each.days):>12} {in_units(each.bytes):>11}   {each.verdict or '-':<10} "
        f"{len(each.stages)}{f'   never pruned: {each.kept}' if each.kept else ''}"
        for each in held
    ]
    together = on_disk(held)
    lines.append(f"{len(held)} runs take {in_units(together)} on the disk; what they share counts once.")
    return {"runs": [each.to_json() for each in held], "bytes": together}, "\n".join(lines)


def compared(runs_dir: Path, run_ids: Sequence[str]) -> Answer:
    """Where these runs differ, a line a field."""
    runs = [Run.open(runs_dir, run_id) for run_id in run_ids]
    table = differences(runs)
    if not table:
        return {"differences": {}}, "They differ in nothing: configuration, versions and figures are the same."
    names = [run.run_id for run in runs]
    room = max(0, columns() - (WIDTH + 1) * len(names))
    width = min(max(len(name) for name in table), room)
    lines = [" ".join([f"{'':<{width}}", *(f"{name:>{WIDTH}}" for name in names)])]
    for name, values in table.items():
        lines += [name] if len(name) > width else []  # a long one has a line of its own
        head = "" if len(name) > width else name
        lines.append(" ".join([f"{head:<{width}}", *(f"{_short(values[each]):>{WIDTH}}" for each in names)]))
    return {"differences": table}, "\n".join(lines)


def pruned(runs_dir: Path, older_than_days: float | None, total_gib: float | None, really: bool) -> Answer:
    """What pruning removes, or, with `really`, has removed."""
    total = None if total_gib is None else int(total_gib * (1 << 30))
    held = survey(runs_dir)
    plan = plan_pruning(held, older_than_days=older_than_days, total_bytes=total)
    gone = prune(runs_dir, plan) if really else []
    going = [each for each in plan.going if not really or each.run.run_id in gone]
    lines = [f"{each.run.run_id:<24} {_ago(each.days):>12} {in_units(each.bytes):>11}" for each in going]
    verb = "Removed" if really else "Would remove"
    lines.append(
        f"{verb} {len(going)} of {len(held)} runs, {in_units(plan.freed)}; {in_units(plan.left)} are left."
        + ("" if really or not going else " Nothing was removed: say --yes to do it.")
    )
    lines += [plan.note] if plan.note else []
    answer = {
        "removed" if really else "would_remove": [each.run.run_id for each in going],
        "bytes_freed": plan.freed,
        "bytes_left": plan.left,
        "never_removed": {each.run.run_id: each.kept for each in held if each.kept},
        "note": plan.note,
    }
    return answer, "\n".join(lines)


def _ago(days: float) -> str:
    return f"{days:.0f} days ago" if days >= 2 else f"{days * 24:.1f} h ago"


def _short(value: Any) -> str:
    text = "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."
