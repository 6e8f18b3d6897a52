"""Files of JSON Lines: how they are told from one document, and their lines one by one.

for number, value in parsed_lines(path): ...        # an Unreadable in place of a line that is no JSON
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from traceforge_core.trajectories.formats.protocol import Unreadable
from traceforge_core.trajectories.parsing import DOCUMENT_LIMIT, open_bytes, parse

SAMPLE_LINES = 50


def first_line(path: Path) -> tuple[Any, bool] | None:
    """The value of the first line, and whether the file ends with it; None where the line is no JSON by itself."""
    with open_bytes(path) as file:
        line = file.readline(DOCUMENT_LIMIT)
        while line and not line.strip():
            line = file.readline(DOCUMENT_LIMIT)
        if line.lstrip()[:1] not in (b"{", b"[") and not line.startswith(b"\xef\xbb\xbf"):
            return None
        if len(line.strip()) < 3:  # a bracket: the first line of a document on many
            return None
        try:
            value = parse(line)
        except Unreadable:
            return None
        while rest := file.read(1 << 16):
            if rest.strip():
                return value, False
        return value, True


def looks_like_lines(data: bytes) -> bool:
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


def parsed_lines(path: Path, span: tuple[int, int, int] | None = None) -> Iterator[tuple[int, Any]]:
    """(number, value) of the lines that are not blank; an Unreadable in place of a value that is no JSON.

    span: only those in (start, end) of the bytes, the first of which has the number that comes third.
    """
    with open_bytes(path) as file:
        start, end, first = span or (0, None, 1)
        if span:
            file.seek(start)
        number, position = first - 1, start
        while (end is None or position < end) and (line := file.readline(DOCUMENT_LIMIT + 1)):
            number += 1
            position += len(line)
            if not line.strip():
                continue
            if len(line) > DOCUMENT_LIMIT:
                while line and not line.endswith(b"\n"):
                    line = file.readline(DOCUMENT_LIMIT + 1)
                    position += len(line)
                yield number, Unreadable("too_large", f"one line of more than {DOCUMENT_LIMIT >> 20} MiB")
                continue
            try:
                yield number, parse(line)
            except Unreadable as problem:
                yield number, problem
