"""A server that stays small: SQLite's caches have a bound, and what is free goes back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
# Four connections that each may keep 80 MB, as Prefect's may, read 64 MB each; then: MiB that SQLite has in use.
READ_ALL = """
import sqlite3, sys
from deployments.lean import bound_caches
if sys.argv[2] == "bounded":
    bound_caches(8 << 20)
connections = [sqlite3.connect(sys.argv[1]) for _ in range(4)]
for connection in connections:
    connection.execute("PRAGMA cache_size = 20000")
    connection.execute("SELECT sum(length(x)) FROM t").fetchall()
"""


@pytest.fixture
def database(tmp_path: Path) -> Path:
    import sqlite3

    path = tmp_path / "prefect.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.executemany("INSERT INTO t VALUES (?)", ((bytes(3900),) for _ in range(16_000)))
    return path


def memory_of(database: Path, how: str) -> float:
    """MiB that a process takes with its four connections."""
    script = f"{READ_ALL}\nimport psutil\nprint(psutil.Process().memory_info().rss / 2**20)"
    command = [sys.executable, "-c", script, str(database), how]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    return float(done.stdout)


def test_all_connections_of_a_process_share_the_bound(database: Path) -> None:
    free, bounded = memory_of(database, "free"), memory_of(database, "bounded")
    assert free > 200 and bounded < free - 200


def test_it_is_prefects_own_command_with_its_own_arguments() -> None:
    command = [sys.executable, "-m", "deployments.lean", "server", "start", "--help"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--host" in done.stdout and "prefect server start" in done.stdout, done.stderr


LEAVE_HOLES = """
import psutil
from deployments.lean import give_back
circle = []
circle.append(circle)
circle += [bytearray(3000) for _ in range(60_000)]
kept = circle[1::100]  # between pieces of what becomes garbage
del circle
before = psutil.Process().memory_info().rss
give_back()
print((before - psutil.Process().memory_info().rss) / 2**20)
"""


def test_what_is_freed_between_what_is_kept_goes_back_to_the_machine() -> None:
    command = [sys.executable, "-c", LEAVE_HOLES]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) > 100, "of 170 MiB"
