"""What a command is doing right now, at a terminal as a bar that moves, elsewhere as a line now and then.

    with at_work("starting Prefect's server") as view:
        ...
        view.follow(run)            # from here on: the stage that the run is at, with what it tells of itself

Everything shown is read from files that stages write while they work (traceforge_core/progress.py), so the same view
shows a run that another process works on. All of it goes to stderr. Without a terminal, and with --json, lines come
after 3 seconds and then every 10, so that a log file of a training of days stays readable.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Protocol

from flows.session import last_session
from traceforge_core.runs import Run
from traceforge_core.runs.progress import Progress, read_progress, span
from traceforge_core.stages import STAGES

POLL_SECONDS = 0.5
FIRST_LINE_SECONDS = 3.0
LINE_SECONDS = 10.0


class View:
    """What is followed: a piece of work by name, or a run from stage to stage."""

    def __init__(self, what: str, folder: Path | None = None) -> None:
        self._what, self._folder = what, folder
        self._followed: Run | None = None
        self._since = time.monotonic()

    def say(self, what: str, folder: Path | None = None) -> None:
        """Another piece of work. `folder`: where it tells how far it is, if it does."""
        if (what, folder) != (self._what, self._folder):
            self._what, self._folder, self._since = what, folder, time.monotonic()

    def follow(self, run: Run) -> None:
        """Show the stage that this run is at."""
        self._followed = run

    def now(self) -> tuple[str, float, Progress | None]:
        """What is being done, for how many seconds, and how far it is where that is told."""
        if self._followed is not None:
            noted = last_session(self._followed).get("stages", {})
            at = next((name for name, stage in noted.items() if stage.get("status") == "running"), None)
            if at is None:
                self.say("between stages")
            else:
                self.say(at if at in STAGES else "at work", self._followed.partial_dir(at))
        told = read_progress(self._folder) if self._folder is not None else None
        return self._what, time.monotonic() - self._since, told


@contextlib.contextmanager
def at_work(what: str, folder: Path | None = None, *, bars: bool = True) -> Iterator[View]:
    """Show what is going on inside the block. `bars`: a moving bar where stderr is a terminal."""
    view = View(what, folder)
    painter = (_bar() if bars else None) or _Lines()
    stop = threading.Event()
    thread = threading.Thread(target=_keep_showing, args=(view, painter, stop), daemon=True)
    with painter.open():
        thread.start()
        try:
            yield view
        finally:
            stop.set()
            thread.join(timeout=5)


def _keep_showing(view: View, painter: _Painter, stop: threading.Event) -> None:
    while not stop.wait(POLL_SECONDS):
        painter.paint(*view.now())


class _Painter(Protocol):
    def open(self) -> contextlib.AbstractContextManager[object]: ...

    def paint(self, what: str, seconds: float, told: Progress | None) -> None: ...


class _Lines:
    """A line after a few seconds of a piece of work, then one now and then."""

    def __init__(self) -> None:
        self._what = ""
        self._next = 0.0

    def open(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def paint(self, what: str, seconds: float, told: Progress | None) -> None:
        if what != self._what:
            self._what, self._next = what, FIRST_LINE_SECONDS
        if seconds < self._next:
            return
        self._next = seconds + LINE_SECONDS
        now = datetime.now().astimezone()
        line = f"{now:%H:%M:%S}  {what}: {told.sentence() if told else 'at work'} ({span(seconds)})\n"
        sys.stderr.write(line)
        sys.stderr.flush()


def _bar() -> _Painter | None:
    """A bar for a terminal that can show one, else None. rich is loaded only then."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console

    from flows.cli.bar import Bar

    console = Console(stderr=True)
    return None if console.is_dumb_terminal or not console.is_terminal else Bar(console)
