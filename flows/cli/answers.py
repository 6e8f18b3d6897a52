"""What a command answers: text, or with --json exactly one JSON object on stdout; everything else goes to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any


class Stopped(BaseException):
    """A signal asked this command to end. Not an Exception, so that nothing on the way mistakes it for an error."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Unfinished(Exception):
    """Work that did not end well, with what is there of it: as JSON, and as text for a terminal."""

    def __init__(self, message: str, status: int, answer: dict[str, Any], text: str) -> None:
        super().__init__(message)
        self.status = status
        self.answer = answer
        self.text = text


_answer_to: list[int] = []


def answer(value: dict[str, Any], as_json: bool, text: str) -> None:
    """Print what a command has to say on stdout: `text`, or with `as_json` the object `value`."""
    if not as_json:
        print(text)
        return
    data = json.dumps(value, ensure_ascii=False, default=str) + "\n"
    if not _answer_to:
        sys.stdout.write(data)
        return
    with contextlib.suppress(ConnectionError):  # nobody reads it any more
        with os.fdopen(os.dup(_answer_to[0]), "w", encoding="utf-8") as stdout:
            stdout.write(data)


def tell(text: str) -> None:
    """Print a line beside the answer, on stderr."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def stdout_kept_for_the_answer(as_json: bool) -> Iterator[None]:
    """With --json whatever any library or child process prints goes to stderr, at the level of file descriptors."""
    if not as_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    _answer_to.append(kept)
    try:
        yield
    finally:
        _answer_to.remove(kept)
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
