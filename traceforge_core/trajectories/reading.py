"""Files to trajectories: which format each has, what it holds, and what to set aside.

    for unit in survey(folder).units:
        for item in read_unit(folder, unit):    # Trajectory or Quarantined
            ...

The format is found by content. A file may be one JSON document or several, JSON Lines, or Parquet, packed or not; it
may hold one trajectory or many. Whatever cannot be read becomes a `Quarantined` with its reason; nothing raises and
nothing is lost.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from traceforge_core.trajectories import outcomes
from traceforge_core.trajectories.formats import detect
from traceforge_core.trajectories.formats.completion_log import CompletionLog
from traceforge_core.trajectories.formats.protocol import Unreadable
from traceforge_core.trajectories.model import Trajectory
from traceforge_core.trajectories.parsing import DAMAGED, parse, read_whole
from traceforge_core.trajectories.survey import Quarantined, Unit, label_of
from traceforge_core.trajectories.values import Found, lines_of, values

log = logging.getLogger(__name__)

# Names that say what a file is and not which case it is about.
_GENERIC_NAME = re.compile(r"traj(ectory)?|output|events|history|session|messages|results?|trace", re.IGNORECASE)
_GENERIC_FOLDER = re.compile(r"agents?|logs|trajs?|trajectories|outputs?|events|completions|\.", re.IGNORECASE)
_HARBOR_TRIAL = re.compile(r"(.+)__[A-Za-z0-9]{6,8}")


def read_unit(
    root: Path, unit: Unit, watch: Callable[[Any, list[Trajectory]], None] | None = None
) -> Iterator[Trajectory | Quarantined]:
    """Every trajectory in a unit, in order, or what is wrong with it. Sources are `path`, `path:LINE` or `path#KEY`.

    `watch` is called with each value and what was read from it, for those who compare the two.
    """
    if len(unit.paths) == 1:
        yield from _read_file(root, unit.paths[0], watch, unit.span)
        return
    events, torn = _one_event_a_file(root, unit)
    form = detect(events, logs=True)
    if form is not None:
        yield from _read_value(root, unit.label, Found("", events, form, torn), watch)
        return
    yield from _without_superseded(item for path in unit.paths for item in _read_file(root, path, watch))


def _read_file(
    root: Path,
    relative: str,
    watch: Callable[[Any, list[Trajectory]], None] | None,
    span: tuple[int, int, int] | None = None,
) -> Iterator[Trajectory | Quarantined]:
    source = label_of(relative)
    try:
        path = root / relative
        for found in lines_of(path, span) if span else values(path):
            yield from _read_value(root, source, found, watch)
    except Unreadable as problem:
        if not (span and problem.reason == "no_rows"):  # a part may hold nothing but blank lines, a file may not
            yield Quarantined(source, problem.reason, problem.detail)
    except DAMAGED as error:
        yield Quarantined(source, "damaged_archive", str(error))
    except OSError as error:
        yield Quarantined(source, "cannot_read", error.strerror or str(error))


def _one_event_a_file(root: Path, unit: Unit) -> tuple[list[Any], int]:
    """The values of a unit's files where each holds one event; empty where the first holds something else."""
    events: list[Any] = []
    torn = 0
    for path in unit.paths:
        try:
            value = parse(read_whole(root / path))
        except Unreadable:
            torn += 1
            continue
        if not isinstance(value, dict) or "kind" not in value:
            return [], 0
        events.append(value)
    return events, torn


def _without_superseded(items: Iterable[Trajectory | Quarantined]) -> Iterator[Trajectory | Quarantined]:
    """Leave out each logged call that the next one goes on from; the last of a run says how many there were."""
    held: Trajectory | None = None
    for item in items:
        if isinstance(item, Quarantined) or item.format != CompletionLog.name:
            yield item
            continue
        if held is not None:
            if _goes_on(held, item):
                earlier = held.left_out.get("earlier_call_of_the_run", 0)
                item.left_out = {**item.left_out, "earlier_call_of_the_run": earlier + 1}
            else:
                yield held
        held = item
    if held is not None:
        yield held


def _goes_on(before: Trajectory, after: Trajectory) -> bool:
    """Whether a conversation starts with all of another. Its last turn is compared by its actions and text alone."""
    if len(before.messages) > len(after.messages):
        return False
    return all(
        (a.role, a.content.strip()) == (b.role, b.content.strip())
        for a, b in zip(before.messages, after.messages, strict=False)
    )


def _read_value(
    root: Path, path: str, found: Found, watch: Callable[[Any, list[Trajectory]], None] | None
) -> Iterator[Trajectory | Quarantined]:
    where = path + found.key
    if isinstance(found.form, Unreadable):
        yield Quarantined(where, found.form.reason, found.form.detail)
        return
    try:
        trajectories = [item for item in found.form.read(found.value) if item.messages]
        if not trajectories:
            raise Unreadable("no_messages", f"{found.form.name} without a single message")
        for number, trajectory in enumerate(trajectories):
            several = f"#{trajectory.run or number or 'main'}" if len(trajectories) > 1 else ""
            trajectory.source = where + several
            _place(trajectory, root, path, found.key, several)
        if found.torn:
            first = trajectories[0]
            first.left_out = {**first.left_out, "unparsable_line": found.torn}
    except Unreadable as problem:
        yield Quarantined(where, problem.reason, problem.detail)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        # A value that has a format's outline but not its inside. Which of the countless ways it is broken matters less
        # than that it is set aside and counted.
        log.debug("%s cannot be read as %s", where, found.form.name, exc_info=True)
        yield Quarantined(where, "malformed", f"{found.form.name}: {type(error).__name__}: {error}")
    else:
        if watch is not None:
            watch(found.value, [replace(trajectory) for trajectory in trajectories])
        yield from trajectories


def _place(trajectory: Trajectory, root: Path, path: str, key: str, several: str) -> None:
    """Name case and run from the path where the value itself does not. The run tells apart what has the same case."""
    stem = outcomes.stem_of(path)
    parents = PurePosixPath(path).parent.parts
    if not trajectory.case:
        named = [part for part in reversed(parents) if not _GENERIC_FOLDER.fullmatch(part)]
        trajectory.case = named[0] if named and _GENERIC_NAME.fullmatch(stem) else stem
        trial = _HARBOR_TRIAL.fullmatch(trajectory.case) if trajectory.format == "atif" else None
        if trial:
            trajectory.case = trial.group(1)
    trajectory.case = trajectory.case[:300]
    run = outcomes.run_folder(path, trajectory.case)
    if stem != trajectory.case and not _GENERIC_NAME.fullmatch(stem):
        run = f"{run}/{stem}" if run else stem
    own = several.lstrip("#") or trajectory.run or key.lstrip(":#")
    if own and own != run:
        run = f"{run}#{own}" if run else own
    trajectory.run = run or root.name or "run"
