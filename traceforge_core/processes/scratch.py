"""Folders for what lives only as long as a piece of work, in the system's folder for temporary files.

    with scratch_folder("predict") as folder:
        ...

A process that is killed leaves its folder behind; the next one removes it. Whose process still lives is told by a lock
that the kernel lets go when the process ends, so that neither a process id used again nor another container that shares
the folder is mistaken.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "traceforge-"
LOCK = ".in-use"
YOUNG_SECONDS = 60.0
"""A folder so young may be one whose owner has not locked it yet."""


@contextlib.contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A folder, empty but for its lock, gone after the block. Those of processes that died are removed first."""
    remove_left_behind()
    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{purpose}-", ignore_cleanup_errors=True) as name:
        with (Path(name) / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(name)


def remove_left_behind() -> list[Path]:
    """Remove the scratch folders of this user that no process holds any more. Returns them."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process may be removing it too
            stat = folder.stat()
            if stat.st_uid == os.getuid() and time.time() - stat.st_mtime > YOUNG_SECONDS and _is_left(folder):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed


def _is_left(folder: Path) -> bool:
    try:
        with (folder / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except FileNotFoundError:  # not one of ours, whatever its name
        return False
