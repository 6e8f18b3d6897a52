"""The moving bar of live.py: one line at the foot of the terminal, with log lines scrolling above it."""

from __future__ import annotations

import contextlib
import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

from traceforge_core.runs.progress import Progress as Told


class Bar:
    """Paints what live.py reads. While it is open, what is written to sys.stderr appears above it."""

    def __init__(self, console: Console) -> None:
        rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[told]}", markup=False, table_column=rest),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            expand=True,
            refresh_per_second=4,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=True,
        )
        self._task = self._progress.add_task("", total=None, told="")
        self._what = ""

    def open(self) -> contextlib.AbstractContextManager[object]:
        return self._progress

    def paint(self, what: str, seconds: float, told: Told | None) -> None:
        if what != self._what:
            self._what = what
            self._progress.reset(self._task, total=None, description=what, told="")
        if told is not None:
            self._progress.update(self._task, total=told.total, completed=told.done, told=told.sentence())
