"""How the command line ends: with one message and a status, whatever happened on the way."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from flows.cli.answers import Stopped, Unfinished, answer, stdout_kept_for_the_answer, tell
from traceforge_core.errors import TraceForgeError

# typer's own base of "you typed something wrong"; which package it comes from differs between typer releases.
UsageError: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
SHOWN_LOGGERS = ("traceforge_core", "tasks", "flows")
STEP_LINE = re.compile(r"\[\d+\] step \d+/\d+ ")


def run_to_the_end(app: typer.Typer) -> int:
    """Run a command line. Returns its exit status; every way to end passes through here."""
    as_json = "--json" in sys.argv[1:]
    with stdout_kept_for_the_answer(as_json), stopped_by_signals(), log_on_stderr():
        status = _guarded(app, as_json)
    logging.raiseExceptions = False
    return status


def _guarded(app: typer.Typer, as_json: bool) -> int:
    try:
        if as_json and "--help" in sys.argv[1:]:
            with contextlib.redirect_stdout(io.StringIO()) as page:
                words = [word for word in sys.argv[1:] if word != "--json"]  # `traceforge --help` has no such option
                app(words, prog_name="traceforge", standalone_mode=False)
            answer({"help": page.getvalue()}, True, "")
            return 0
        status = app(prog_name="traceforge", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except Unfinished as error:
        if not as_json:
            tell(error.text)
        return _fail(str(error), error.status, as_json, error.answer)
    except TraceForgeError as error:
        return _fail(str(error), 1, as_json)
    except UsageError as error:
        if not as_json:
            error.show()
            return 1
        return _fail(error.format_message(), 1, as_json)
    except (Stopped, KeyboardInterrupt) as stop:
        return _fail("Stopped.", 128 + getattr(stop, "number", signal.SIGINT), as_json)
    except Exception as error:
        return _fail(unexpected(error, None), 1, as_json)


def _fail(message: str, status: int, as_json: bool, done: dict[str, Any] | None = None) -> int:
    if as_json:
        answer({"error": message} | (done or {}), True, "")
    else:
        tell(f"traceforge: {message}")
    return status


def unexpected(error: Exception, folder: Path | None) -> str:
    """One line about an error nobody foresaw. The full traceback goes to a file; a full disk is told as such."""
    from traceforge_core.runs import disk_is_full, full_disk

    if disk_is_full(error):
        named = getattr(error, "filename", None)
        return str(full_disk(f"could not write {named or 'to it'}"))
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        named = error.filename or "a file"
        return f"No permission to write or read {named}: {error.strerror}. Choose another folder."
    text = "".join(traceback.format_exception(error))
    for candidate in (folder, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            if candidate is not None:
                (candidate / "traceback.txt").write_text(text, encoding="utf-8")
                where = candidate / "traceback.txt"
                return f"Something unexpected went wrong: {type(error).__name__}: {error}. The full traceback: {where}"
    return f"Something unexpected went wrong: {type(error).__name__}: {error}"


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or hang-up raises Stopped; more of them change nothing while things are being ended."""

    def stop(number: int, _frame: Any) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        tell("\nStopping ...")
        raise Stopped(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _OnStderr(logging.Handler):
    """Writes to what sys.stderr is at that moment: a bar on the screen puts itself there, to stay below the lines."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed, or a pipe that nobody reads any more
            tell(self.format(record))


@contextlib.contextmanager
def log_on_stderr() -> Iterator[None]:
    handler = _OnStderr()
    handler.addFilter(lambda record: not STEP_LINE.match(record.getMessage()))  # live.py shows steps in its own way
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    for logger in map(logging.getLogger, SHOWN_LOGGERS):
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in map(logging.getLogger, SHOWN_LOGGERS):
            logger.removeHandler(handler)
