"""A file that one process at a time can have: the kernel gives it back when that process ends, however it ends.

with path.open("a+") as file:           # the claim lasts until the file is closed
    if not take(file):
        print(holder(file))             # the process number of who has it
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import IO


def take(file: IO[str]) -> bool:
    """Claim the file, open to read and write, for this process, whose number is written there; False where another has
    it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    with contextlib.suppress(OSError):  # a full disk: it is claimed all the same, only not told by whom
        os.truncate(file.fileno(), 0)
        os.pwrite(file.fileno(), str(os.getpid()).encode(), 0)
    return True


def holder(file: IO[str]) -> str:
    """The number of the process that has the file, or "?"."""
    file.seek(0)
    return file.read() or "?"
