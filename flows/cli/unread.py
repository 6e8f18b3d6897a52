"""Output that nobody reads any more: `traceforge run 2>&1 | head`.

    outlive_readers()      # first of all, before anything takes hold of sys.stdout or sys.stderr

A pipe whose reader has gone refuses every further write, which would end the work of hours in the middle of some line.
Instead what is written from then on is let go, and the command ends with the status of its work. A run's lines are in
Prefect's log of it all the same, those of its workers in their log files; `traceforge show` has the summary.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


def outlive_readers() -> None:
    """Let stdout and stderr of this process outlive whoever reads them, and those of processes it starts afterwards."""
    sys.stdout, sys.stderr = _outliving(sys.stdout), _outliving(sys.stderr)


def _outliving(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # None where it was closed from the beginning
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Outliving(stream.fileno(), "wb", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
    )


class _Outliving(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except ConnectionError:  # a pipe or a socket whose other end is closed
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes
