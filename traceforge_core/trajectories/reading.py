"""Files to trajectories: which files of a folder to read, which format each has, and what to set aside.

    corpus = survey(folder)
    for path in corpus.files:
        for item in read_file(corpus.root, path):    # Trajectory or Quarantined
            ...

The format is found by content. A file may be one JSON document, JSON Lines, or Parquet, packed or not; it may hold one
trajectory or many. Whatever cannot be read becomes a `Quarantined` with its reason; nothing raises and nothing is lost.
"""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import zstandard

from traceforge_core.trajectories import outcomes
from traceforge_core.trajectories.formats import detect
from traceforge_core.trajectories.formats.protocol import Format, Unreadable
from traceforge_core.trajectories.model import Trajectory
from traceforge_core.trajectories.parsing import (
    DATA_SUFFIXES,
    DOCUMENT_LIMIT,
    PACKED_SUFFIXES,
    open_bytes,
    parse,
    read_head,
    read_whole,
)

log = logging.getLogger(__name__)

SKIPPED_FOLDERS = {".git", "__pycache__", "node_modules", ".venv"}
SAMPLE_LINES = 50
# Names that say what a file is and not which case it is about.
GENERIC_NAMES = set("trajectory traj output events history session messages result results trace".split())
GENERIC_FOLDERS = set("agent agents logs trajs traj trajectories output outputs events completions".split())
_JSON_START = re.compile(rb'\s*(\{\s*"|\{\s*\}|\[\s*[\[{"\]])')


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Something that was set aside: `reason` is a fixed word to count by, `detail` says where and why."""

    source: str
    reason: str
    detail: str


@dataclass(slots=True)
class Corpus:
    """What lies in a folder. Paths are relative to `root`, in the order in which they are read."""

    root: Path
    files: list[str] = field(default_factory=list)
    outcome_files: dict[str, list[outcomes.Claim]] = field(default_factory=dict)
    other_files: Counter[str] = field(default_factory=Counter)
    unreadable: list[Quarantined] = field(default_factory=list)


def survey(path: Path) -> Corpus:
    """Sort the files below a folder (or a single file) into trajectory files, outcome files and others, by their first
    bytes. Parses outcome files only."""
    if path.is_file():
        return Corpus(path.parent, [path.name])
    corpus = Corpus(path)

    def refused(error: OSError) -> None:
        corpus.unreadable.append(
            Quarantined(_relative(path, Path(error.filename or path)), "cannot_read", error.strerror or str(error))
        )

    for folder, subfolders, names in os.walk(path, onerror=refused):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
        for name in sorted(names):
            file = Path(folder, name)
            if not file.is_file():
                corpus.other_files["not a file"] += 1
                continue
            _sort(corpus, file)
    corpus.files.sort()
    return corpus


def _sort(corpus: Corpus, file: Path) -> None:
    relative = os.path.relpath(file, corpus.root)
    head = read_head(file)
    if any(hint in head for hint in outcomes.HINTS):
        claims = _claims_of(file)
        if claims is not None:
            corpus.outcome_files[label_of(relative)] = claims
            return
    if b'"model_patch"' in head and _is_predictions(file):
        corpus.other_files["predictions"] += 1
    elif is_data_name(file.name) or _JSON_START.match(head.removeprefix(b"\xef\xbb\xbf")) or head[:4] == b"PAR1":
        corpus.files.append(relative)
    else:
        corpus.other_files[file.suffix.lower() or "without suffix"] += 1


def is_data_name(name: str) -> bool:
    """Whether a file's name promises data, so that it must be read or reported."""
    name = name.lower()
    for suffix in PACKED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name.endswith(DATA_SUFFIXES)


def _claims_of(file: Path) -> list[outcomes.Claim] | None:
    try:
        return outcomes.claims_in(parse(read_whole(file)))
    except Unreadable:
        return None


def _is_predictions(file: Path) -> bool:
    """SWE-bench predictions: patches by case, no trajectory in them."""
    try:
        value = parse(read_whole(file))
    except Unreadable:
        return False
    rows = list(value.values()) if isinstance(value, dict) and "model_patch" not in value else value
    rows = [rows] if isinstance(rows, dict) else rows
    return isinstance(rows, list) and all(
        isinstance(row, dict) and "model_patch" in row and not ({"messages", "trajectory", "history"} & row.keys())
        for row in rows
    )


def read_file(root: Path, relative: str) -> Iterator[Trajectory | Quarantined]:
    """Every trajectory in a file, in order, or what is wrong with it. Sources are `path`, `path:LINE` or `path#KEY`."""
    source = label_of(relative)
    try:
        for key, value, form in _values(root / relative):
            yield from _read_value(root, source, key, value, form)
    except Unreadable as problem:
        yield Quarantined(source, problem.reason, problem.detail)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        yield Quarantined(source, "cannot_read", str(error))


_Value = tuple[str, Any, Format | Unreadable]


def _values(path: Path) -> Iterator[_Value]:
    """The values of a file that are to be read on their own: (key, value, its format or what is wrong with it)."""
    head = read_head(path)
    if head[:4] == b"PAR1":
        yield from _known_rows(_parquet_rows(path), "#")
        return
    first = _first_line(path)
    if first is not None:
        value, is_all = first
        if not is_all:
            yield from _lines(path)
            return
        yield from _document(value)
        return
    data = read_whole(path)
    try:
        value = parse(data)
    except Unreadable as problem:
        if problem.reason != "invalid_json" or not _looks_like_lines(data):
            raise
        del data
        yield from _lines(path)
        return
    del data
    yield from _document(value)


def _first_line(path: Path) -> tuple[Any, bool] | None:
    """The value of the first line, and whether the file ends with it; None where the line is no JSON by itself."""
    with open_bytes(path) as file:
        line = file.readline(DOCUMENT_LIMIT)
        if line.lstrip()[:1] not in (b"{", b"[") and not line.startswith(b"\xef\xbb\xbf"):
            return None
        try:
            value = parse(line)
        except Unreadable:
            return None
        while rest := file.read(1 << 16):
            if rest.strip():
                return value, False
        return value, True


def _looks_like_lines(data: bytes) -> bool:
    """Whether most of the first lines are JSON by themselves, some of them objects."""
    good = objects = total = 0
    for line in data[: 4 << 20].split(b"\n")[:SAMPLE_LINES]:
        if not line.strip():
            continue
        total += 1
        try:
            value = parse(line)
        except Unreadable:
            continue
        good += 1
        objects += isinstance(value, dict)
    return objects > 0 and good * 2 > total


def _document(value: Any) -> Iterator[_Value]:
    """One JSON document: a trajectory, a log in an array, or an array of rows."""
    form = detect(value) or (detect(value, logs=True) if isinstance(value, list) else None)
    if form is None and isinstance(value, dict):
        form = detect([value], logs=True)
        value = value if form is None else [value]
    if form is not None:
        yield "", value, form
    elif isinstance(value, list) and value:
        yield from _known_rows(((str(i), row) for i, row in enumerate(value)), "#")
    else:
        raise Unreadable("unknown_format", describe(value))


def _lines(path: Path) -> Iterator[_Value]:
    """JSON Lines: a log, where the first lines together are one, else rows."""
    lines = _parsed_lines(path)
    sample = list(islice(lines, SAMPLE_LINES))
    form = detect([value for _, value in sample if not isinstance(value, Unreadable)], logs=True)
    if form is None:
        yield from _known_rows(((str(number), value) for number, value in chain(sample, lines)), ":")
        return
    everything = [value for _, value in chain(sample, lines)]
    yield "", everything, form


def _parsed_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(number, value) of the lines that are not blank; an Unreadable in place of a value that is no JSON."""
    with open_bytes(path) as file:
        number = 0
        while line := file.readline(DOCUMENT_LIMIT + 1):
            number += 1
            if not line.strip():
                continue
            if len(line) > DOCUMENT_LIMIT:
                while line and not line.endswith(b"\n"):
                    line = file.readline(DOCUMENT_LIMIT + 1)
                yield number, Unreadable("too_large", f"one line of more than {DOCUMENT_LIMIT >> 20} MiB")
                continue
            try:
                yield number, parse(line)
            except Unreadable as problem:
                yield number, problem


def _known_rows(rows: Iterator[tuple[str, Any]], mark: str) -> Iterator[_Value]:
    """Rows with the format of each. A file whose first rows are all of no known format is one problem, not
    thousands."""
    first: list[_Value] = []
    known = False
    for key, value in rows:
        form = value if isinstance(value, Unreadable) else detect(value) or detect([value], logs=True)
        if form is not None and not isinstance(form, Unreadable) and form.is_log:
            value = [value]
        item = (mark + key, value, form or Unreadable("unknown_format", describe(value)))
        if known:
            yield item
            continue
        first.append(item)
        known = form is not None and not isinstance(form, Unreadable)
        if known:
            yield from first
        elif len(first) >= SAMPLE_LINES:
            break
    if not known:
        if not first:
            raise Unreadable("no_rows", "the file holds no rows")
        problems = [form.reason for _, _, form in first if isinstance(form, Unreadable)]
        if len(first) == 1 or "unknown_format" not in problems:
            yield from first
            return
        raise Unreadable("unknown_format", f"rows of no known format; the first is {describe(first[0][1])}")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=16):
                for row in batch.to_pylist():
                    yield str(number), row
                    number += 1
    except (pa.ArrowException, ValueError) as error:
        raise Unreadable("damaged_parquet", str(error)) from None


def _read_value(
    root: Path, source: str, key: str, value: Any, form: Format | Unreadable
) -> Iterator[Trajectory | Quarantined]:
    where = source + key
    if isinstance(form, Unreadable):
        yield Quarantined(where, form.reason, form.detail)
        return
    try:
        trajectories = list(form.read(value))
        if not trajectories:
            raise Unreadable("no_messages", f"{form.name} without a single message")
        several = len(trajectories) > 1
        for number, trajectory in enumerate(trajectories):
            if not trajectory.messages:
                yield Quarantined(where, "no_messages", f"{form.name} without a single message")
                continue
            name = trajectory.run or str(number)
            trajectory.source = f"{where}#{name}" if several else where
            _place(trajectory, root, source, key)
            yield trajectory
    except Unreadable as problem:
        yield Quarantined(where, problem.reason, problem.detail)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        # A value that has a format's outline but not its inside. Which of the countless ways it is broken matters less
        # than that it is set aside and counted.
        log.debug("%s cannot be read as %s", where, form.name, exc_info=True)
        yield Quarantined(where, "malformed", f"{form.name}: {type(error).__name__}: {error}")


def _place(trajectory: Trajectory, root: Path, path: str, key: str) -> None:
    """Name case and run from the path where the value itself does not."""
    stem = outcomes.stem_of(path)
    parents = Path(path).parent.parts
    if not trajectory.case:
        named = [part for part in reversed(parents) if part.lower() not in GENERIC_FOLDERS]
        trajectory.case = named[0] if stem.lower() in GENERIC_NAMES and named else stem
    folder = outcomes.run_folder(path, trajectory.case)
    run = folder
    if stem != trajectory.case and stem.lower() not in GENERIC_NAMES:
        run = f"{run}/{stem}" if run else stem
    own = trajectory.run or key.lstrip(":#")
    if own and own != run:
        run = f"{run}#{own}" if run else own
    trajectory.run = run or root.name or "run"


def describe(value: Any) -> str:
    """A value in a few words, for a message."""
    if isinstance(value, dict):
        keys = ", ".join(str(key)[:40] for key in islice(value, 8))
        return f"an object with the keys {keys}{', ...' if len(value) > 8 else ''}" if value else "an empty object"
    if isinstance(value, list):
        return f"a list of {len(value)}: {describe(value[0])}" if value else "an empty list"
    return f"a {type(value).__name__} ({str(value)[:60]!r})"


def label_of(relative: str) -> str:
    """A path as it stands in reports: forward slashes, and valid Unicode whatever the file system holds."""
    return os.fsencode(relative.replace(os.sep, "/")).decode("utf-8", "replace")


def _relative(root: Path, path: Path) -> str:
    return label_of(os.path.relpath(path, root))
