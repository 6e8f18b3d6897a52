"""Rows of figures that a benchmark finds: on the disk as soon as they are there, and tables of them at the end.

    measured = Measured(out / "scaling.jsonl", key=("section", "strategy", "workers", "length"))
    with measured.reported(section="speed", strategy="oracle", workers=1, length=8192) as record:
        record(seconds=12.5)
    print(measured.markdown())

Rows of earlier calls with the same file stay, unless the same thing is measured again: one table can come from several
machines.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from traceforge_core.errors import TraceForgeError

Row = dict[str, Any]


class Measured:
    """`key`: the columns that say what was measured; a newer row with the same ones takes an older one's place."""

    def __init__(self, path: Path, key: Sequence[str]) -> None:
        self._path, self._key = path, tuple(key)
        self._rows: dict[tuple[Any, ...], Row] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._keep(json.loads(line))

    def rows(self, section: str) -> list[Row]:
        """What is known of a section, in the order in which it was first measured."""
        return [row for row in self._rows.values() if row["section"] == section]

    @contextlib.contextmanager
    def reported(self, **what: Any) -> Iterator[Callable[..., None]]:
        """Yields the function that records the figures. What fails is a row too: out of memory, too few GPUs."""
        try:
            yield lambda **figures: self._record(what | figures)
        except TraceForgeError as error:
            self._record(what | {"cannot": str(error).splitlines()[0]})

    def markdown(self) -> str:
        """A table a section."""
        sections = dict.fromkeys(row["section"] for row in self._rows.values())
        return "\n".join(f"## {section}\n\n{table(self.rows(section))}\n" for section in sections)

    def _record(self, row: Row) -> None:
        self._keep(row)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        what = ", ".join(show(row[column]) for column in self._key)
        say(f"{what}: {', '.join(f'{name} {show(value)}' for name, value in row.items() if name not in self._key)}")

    def _keep(self, row: Row) -> None:
        self._rows[tuple(row[column] for column in self._key)] = row


def table(rows: Sequence[Row]) -> str:
    """Markdown, with a column for whatever any row has."""
    columns = list(dict.fromkeys(name for row in rows for name in row if name != "section"))
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    lines += [f"| {' | '.join(show(row.get(column, '-')) for column in columns)} |" for row in rows]
    return "\n".join(lines)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
