"""A CSV file that grows one row at a time and is whole after every row, whatever ends the process.

with CsvLog(path, ("ts", "elapsed_s", "value")) as log:
    log.row({"ts": ..., "elapsed_s": 0.0, "value": None})     # None: an empty cell
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any


class CsvLog:
    """Appends rows to a CSV. A file that is already there is continued; its torn last row (a killed run) is cut off.

    Raises OSError where the file cannot be written, such as on a full disk.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _whole_rows(path)
        self._file = path.open("r+b" if kept else "wb")
        if kept:
            self._file.truncate(kept)
            self._file.seek(kept)
        else:
            self._write(self.columns)

    def row(self, values: Mapping[str, Any]) -> None:
        """Append one row and hand it to the operating system. A column without a value stays empty."""
        self._write(["" if values.get(name) is None else values[name] for name in self.columns])

    def _write(self, cells: Sequence[Any]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells)
        self._file.write(text.getvalue().encode("utf-8"))
        self._file.flush()

    def __enter__(self) -> CsvLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """The whole rows of such a file, cells as text; nothing where there is no file."""
    kept = _whole_rows(path)
    if kept:
        with path.open("rb") as file:
            yield from csv.DictReader(io.StringIO(file.read(kept).decode("utf-8")))


def _whole_rows(path: Path) -> int:
    """Bytes up to and with the last line end; 0 where there is no file. A row is far shorter than what is looked at."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return 0
    if not size:
        return 0
    start = max(0, size - 65536)
    with path.open("rb") as file:
        file.seek(start)
        return start + file.read(size - start).rfind(b"\n") + 1
