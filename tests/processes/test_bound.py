"""A bound process ends with the one that started it, even if that one is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]
PARENT = """
    import os, subprocess, sys
    child = subprocess.Popen(
        [sys.executable, "-m", "traceforge_core.processes.bound", str(os.getpid()), "-c"]
        + ["import time; time.sleep(600)"],
        start_new_session=True,
    )
    print(child.pid, flush=True)
    child.wait()
"""


def test_a_bound_process_dies_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        deadline = time.monotonic() + 20
        while "traceforge_core.processes.bound" in child.cmdline():  # until it has become the program that it was given
            assert time.monotonic() < deadline
            time.sleep(0.02)
        parent.kill()
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_process_whose_parent_is_gone_already_does_not_start() -> None:
    someone_else = os.getppid()
    command = [sys.executable, "-m", "traceforge_core.processes.bound", str(someone_else), "-c", "print('at work')"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
