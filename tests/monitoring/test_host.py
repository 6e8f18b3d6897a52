"""The host sampler, on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from traceforge_core.monitoring import host
from traceforge_core.monitoring.csvlog import read_rows

BUSY = "import time\nblock = bytearray(80 * 2**20)\nend = time.time() + 60\nwhile time.time() < end: pass\n"


def sample(folder: Path, enough: Callable[[list[dict[str, str]]], bool], ignore: frozenset[int] = frozenset()) -> list:
    """Run the sampler over this process's children until `enough` says so of the rows, then stop it."""
    stop = threading.Event()
    thread = threading.Thread(target=host.watch, args=(folder, 0.2, stop, os.getpid()), kwargs={"ignore": ignore})
    thread.start()
    deadline = time.monotonic() + 20
    rows: list[dict[str, str]] = []
    while time.monotonic() < deadline and not enough(rows):
        time.sleep(0.1)
        rows = list(read_rows(folder / host.FILE_NAME))
    stop.set()
    thread.join(timeout=10)
    assert not thread.is_alive()
    return rows


def test_a_busy_child_shows_its_cpu_and_memory(tmp_path: Path) -> None:
    script = tmp_path / "busy worker.py"
    script.write_text(BUSY)
    with subprocess.Popen([sys.executable, str(script)]) as child:
        try:
            rows = sample(
                tmp_path,
                lambda rows: any(int(row["rss_mib"]) > 60 and float(row["cpu_percent"] or 0) > 10 for row in rows),
            )
        finally:
            child.kill()
    mine = [row for row in rows if row["pid"] == str(child.pid)]
    assert mine[0]["cpu_percent"] == "", "the first row of a process has nothing to count from"
    assert max(float(row["cpu_percent"]) for row in mine[1:]) > 10
    assert max(int(row["rss_mib"]) for row in mine) > 60
    assert {row["command"] for row in mine} == {"busy worker.py"}
    assert str(os.getpid()) not in {row["pid"] for row in rows}


def test_a_worker_is_named_by_its_stage_and_rank(tmp_path: Path) -> None:
    job = tmp_path / "branch_parallel" / "job.json"
    command = [sys.executable, "-c", BUSY, str(job)]
    with subprocess.Popen(command, env=os.environ | {"TRACEFORGE_RANK": "1"}) as child:
        try:
            rows = sample(tmp_path, lambda rows: any(row["pid"] == str(child.pid) for row in rows))
        finally:
            child.kill()
    assert {row["command"] for row in rows if row["pid"] == str(child.pid)} == {"branch_parallel 1"}


def test_grandchildren_are_seen_and_ignored_processes_are_not(tmp_path: Path) -> None:
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"
    with (
        subprocess.Popen([sys.executable, "-c", BUSY]) as server,
        subprocess.Popen([sys.executable, "-c", nested]) as parent,
    ):
        try:
            rows = sample(tmp_path, lambda rows: len({row["pid"] for row in rows}) >= 2, ignore=frozenset({server.pid}))
            pids = {int(row["pid"]) for row in rows}
            assert server.pid not in pids
            assert parent.pid in pids and len(pids) >= 2
        finally:
            for pid in (*host.descendants(parent.pid), parent.pid, server.pid):
                os.kill(pid, 9)


def test_a_full_disk_ends_the_sampling_with_a_warning_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / host.FILE_NAME).symlink_to("/dev/full")
    host.watch(tmp_path, 0.05, threading.Event(), os.getpid())
    assert "Host monitor stopped" in caplog.text
