"""A file's values that are to be read on their own, each with its format: one document, the rows of an array, lines, or
the events of one log.

    for found in values(path): ...
    parts = split(root, unit, 64 << 20)         # a large file of JSON Lines in parts, for several processes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from traceforge_core.trajectories.formats import detect
from traceforge_core.trajectories.formats.chat import role_of
from traceforge_core.trajectories.formats.protocol import Format, Unreadable
from traceforge_core.trajectories.json_lines import SAMPLE_LINES, first_line, looks_like_lines, parsed_lines
from traceforge_core.trajectories.parsing import (
    DAMAGED,
    ZSTD_MAGIC,
    array_items,
    documents,
    parse,
    read_head,
    read_whole,
)
from traceforge_core.trajectories.survey import Unit


@dataclass(frozen=True, slots=True)
class Found:
    """A value to be read on its own: `key` tells it from others of its file, `form` is its format or what is wrong with
    it, `torn` counts lines of a log that are no JSON."""

    key: str
    value: Any
    form: Format | Unreadable
    torn: int = 0


def values(path: Path) -> Iterator[Found]:
    """The values of a file that are to be read on their own."""
    if read_head(path, 4) == b"PAR1":
        yield from _known_rows(_parquet_rows(path), "#")
        return
    if (first := first_line(path)) is not None:
        value, is_all = first
        yield from _document(value) if is_all else _lines(path)
        return
    try:
        data = read_whole(path)
    except Unreadable as problem:
        if problem.reason != "too_large":
            raise
        if (several := _several_documents(path)) is not None:
            yield from _rows_or_log(several, "#")
        else:
            yield from _known_rows(((str(i), row) for i, row in enumerate(array_items(path))), "#")
        return
    try:
        value = parse(data)
    except Unreadable as problem:
        if problem.reason != "invalid_json":
            raise
        lines = looks_like_lines(data)
        del data
        if lines:
            yield from _lines(path)
        elif (several := _several_documents(path)) is not None:
            yield from _rows_or_log(several, "#")
        else:
            raise
        return
    del data
    yield from _document(value)


def lines_of(path: Path, span: tuple[int, int, int]) -> Iterator[Found]:
    """The rows in a part of a file of JSON Lines: (start, end) in bytes, and the number of its first line."""
    return _known_rows(_numbered(parsed_lines(path, span)), ":")


def _document(value: Any) -> Iterator[Found]:
    """One JSON document: a trajectory, a log in an array, or an array of rows."""
    form = detect(value) or (detect(value, logs=True) if isinstance(value, list) else None)
    if form is None and isinstance(value, dict):
        form = detect([value], logs=True)
        value = value if form is None else [value]
    if form is not None:
        yield Found("", value, form)
    elif isinstance(value, list) and value:
        yield from _known_rows(((str(i), row) for i, row in enumerate(value)), "#")
    else:
        raise Unreadable("unknown_format", describe(value))


def _lines(path: Path) -> Iterator[Found]:
    """JSON Lines: a log, where the first lines together are one, else rows."""
    return _rows_or_log(parsed_lines(path), ":")


def _several_documents(path: Path) -> Iterator[tuple[int, Any]] | None:
    """(number from 0, value) of the documents of a file that begins with a whole one and does not end there; else
    None."""
    found = enumerate(documents(path))
    first = list(islice(found, 2))
    if len(first) < 2 or not isinstance(first[0][1], (dict, list)):
        return None
    return chain(first, found)


def _rows_or_log(values: Iterator[tuple[int, Any]], mark: str) -> Iterator[Found]:
    """Numbered values of a file: a log, where the first together are one, else rows."""
    sample = list(islice(values, SAMPLE_LINES))
    form = detect([value for _, value in sample if not isinstance(value, Unreadable)], logs=True)
    rows_known = form is None or any(detect(value) for _, value in sample[:3] if not isinstance(value, Unreadable))
    if form is None or rows_known:
        yield from _known_rows(_numbered(chain(sample, values)), mark)
        return
    everything = [value for _, value in chain(sample, values)]
    good = [value for value in everything if not isinstance(value, Unreadable)]
    yield Found("", good, form, len(everything) - len(good))


def _numbered(lines: Iterable[tuple[int, Any]]) -> Iterator[tuple[str, Any]]:
    return ((str(number), value) for number, value in lines)


def split(root: Path, unit: Unit, size: int) -> list[Unit]:
    """A large file of JSON Lines, each its own trajectory, in parts of about `size` bytes; any other unit as it is."""
    if len(unit.paths) > 1 or unit.bytes < 2 * size:
        return [unit]
    path = root / unit.paths[0]
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            if magic in (b"PAR1", ZSTD_MAGIC) or magic[:2] == b"\x1f\x8b" or _is_log_or_document(path):
                return [unit]
            parts, start, first = [], 0, 1
            file.seek(0)
            while start < unit.bytes:
                count = done = 0
                while done < size and (block := file.read(min(1 << 20, size - done))):
                    count, done = count + block.count(b"\n"), done + len(block)
                rest = file.readline()
                end = file.tell()
                parts.append(Unit(unit.paths, end - start, (start, end, first)))
                start, first = end, first + count + rest.endswith(b"\n")
                if not done:
                    break
            return parts
    except (OSError, Unreadable, *DAMAGED):
        return [unit]  # reading it will say what is wrong


def _is_log_or_document(path: Path) -> bool:
    first = first_line(path)
    if first is None or first[1]:
        return True
    sample = [value for _, value in islice(parsed_lines(path), SAMPLE_LINES) if not isinstance(value, Unreadable)]
    return detect(sample, logs=True) is not None or not any(detect(value) for value in sample[:3])


def _known_rows(rows: Iterator[tuple[str, Any]], mark: str) -> Iterator[Found]:
    """Rows with the format of each. A file whose first rows are all of no known format is one problem, not
    thousands."""
    first: list[Found] = []
    known = False
    for key, value in rows:
        item = _row(mark + key, value)
        if known:
            yield item
            continue
        first.append(item)
        known = not isinstance(item.form, Unreadable)
        if known:
            yield from first
        elif len(first) >= SAMPLE_LINES:
            break
    if known:
        return
    if not first:
        raise Unreadable("no_rows", "the file holds no rows")
    problems = [item.form.reason for item in first if isinstance(item.form, Unreadable)]
    if len(first) > 1 and "unknown_format" in problems:
        raise Unreadable("unknown_format", f"rows of no known format; the first is {describe(first[0].value)}")
    yield from first


def _row(key: str, value: Any) -> Found:
    if isinstance(value, Unreadable):
        return Found(key, None, value)
    if form := detect(value):
        return Found(key, value, form)
    if form := detect([value], logs=True):
        return Found(key, [value], form)
    return Found(key, value, Unreadable("unknown_format", describe(value)))


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
    except (pa.ArrowException, ValueError, OSError) as error:
        raise Unreadable("damaged_parquet", str(error)) from None


def describe(value: Any) -> str:
    """A value in a few words, for a message."""
    if isinstance(value, dict):
        keys = ", ".join(str(key)[:40] for key in islice(value, 8))
        if not value:
            return "an empty object"
        return f"an object with the keys {keys}{', ...' if len(value) > 8 else ''}{_fault_of_messages(value)}"
    if isinstance(value, list):
        return f"a list of {len(value)}: {describe(value[0])}" if value else "an empty list"
    return "null" if value is None else f"a {type(value).__name__} ({str(value)[:60]!r})"


def _fault_of_messages(value: dict[str, Any]) -> str:
    """What keeps the `messages` of an object from being a chat, where that is easily said."""
    messages = value.get("messages", ())
    if not isinstance(messages, list):
        return f"; messages is {describe(messages)}" if "messages" in value else ""
    if not messages:
        return "; messages is empty"
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            return f"; messages[{number}] is {describe(message)}"
        if role_of(message.get("role")) is None:
            return f"; messages[{number}] has the role {str(message.get('role'))[:40]!r}"
    return ""
