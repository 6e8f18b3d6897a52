"""Prefect's command for a server or worker that runs for months: its memory stays where it is after the first runs.

    python -m deployments.lean server start --host 127.0.0.1
    python -m deployments.lean worker start --pool traceforge

Two things let them grow by themselves, and no setting of Prefect's says otherwise:

- In a server each connection to an SQLite database may keep 20,000 pages (80 MB) of it in memory, so it grows with its
  database, to some hundred MB. SQLite has a limit for all connections of a process; near it the oldest pages give way.
  (A server on PostgreSQL has no such cache.)
- What is freed stays with the process, in pieces between what is not. Once a minute it is given back. Garbage in
  circles is looked for before that, among the objects that came since the start: 600,000 are there from imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import runpy
import sqlite3
import sys
import threading
import time

MOST_BYTES = 16 << 20
EVERY_SECONDS = 60.0


def bound_caches(most: int = MOST_BYTES) -> None:
    """Have SQLite's caches in this process take no more than so many bytes together, from now on."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(f"PRAGMA soft_heap_limit = {most}")  # of the process, not of this connection


def give_back() -> None:
    """Give memory that is free back to the machine (where the C library is glibc)."""
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_lean(every: float = EVERY_SECONDS) -> None:
    """Give back for as long as the process lives. What is there after the first time is not looked at again."""
    time.sleep(every)
    give_back()
    gc.freeze()
    while True:
        time.sleep(every)
        give_back()


if __name__ == "__main__":
    bound_caches()
    threading.Thread(target=keep_lean, daemon=True).start()
    sys.argv[0] = "prefect"
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
