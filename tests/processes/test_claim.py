"""A file that one process at a time can have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from traceforge_core.processes.claim import holder, take

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("mode", ["a+", "r+"])
def test_a_claimed_file_names_its_process_and_is_free_again_once_that_is_killed(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "claimed"
    path.write_text("the number of one before, which was longer")
    program = (
        "import sys, time\nfrom traceforge_core.processes.claim import take\n"
        f"file = open({str(path)!r}, {mode!r})\nassert take(file)\nprint('have it', flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"have it\n"
        with path.open(mode) as file:
            assert not take(file)
            assert holder(file) == str(other.pid)
            other.kill()
            other.wait()
            assert take(file)
    assert path.read_text() == str(os.getpid())
