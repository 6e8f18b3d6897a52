"""What a format is: something that recognises a parsed value and reads trajectories out of it.

A reader of a new format is one module here with an object of this shape, named in `formats/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from traceforge_core.trajectories.model import Trajectory


class Unreadable(Exception):
    """A value that cannot become a trajectory. `reason` is a short fixed word to count by, `detail` says where and
    why."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class Format(Protocol):
    """One trajectory format.

    A value is what a JSON document holds, one line of JSON Lines, one Parquet row, or, where `is_log` is True, the list
    of all the lines of a file that together make up a trajectory (or several, in the case of branches).
    """

    name: str
    is_log: bool

    def matches(self, value: Any) -> bool:
        """Whether the value has this format, by its content. Must be cheap and never raise."""
        ...

    def read(self, value: Any) -> Iterator[Trajectory]:
        """The trajectories in a value that matches. `case` and `run` stay empty where the value does not name them:
        whoever reads the file takes them from its path. Raises Unreadable."""
        ...
