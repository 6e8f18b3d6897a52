"""`traceforge ... | head`: whoever reads is gone, and the work goes on."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from flows.session import FILE_NAME
from tests.flows.conftest import FAKES, environment
from traceforge_core.config import load_config
from traceforge_core.stages import pipeline


def unread() -> int:
    """The end to write to of a pipe whose reader is gone."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_any_more_goes_on_and_ends_with_its_own_status(
    prefect_home: Path, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, str(FAKES), "run"],
        cwd=tmp_path,
        env=environment(prefect_home, FAKE_COMPARE="disagree"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=120) == 2
    [session] = tmp_path.glob(f"runs/*/{FILE_NAME}")
    noted = json.loads(session.read_text(encoding="utf-8"))
    assert {name: stage["status"] for name, stage in noted["stages"].items()} == dict.fromkeys(
        pipeline(load_config()), "completed"
    )
    with contextlib.closing(sqlite3.connect(prefect_home / "prefect.db")) as database:
        found = database.execute("SELECT message FROM log WHERE flow_run_id = ?", (noted["flow_run_id"],))
        assert ("a line from compare",) in found.fetchall(), "what was not printed is in the run's log"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["config"], 0), (["config", "--json"], 0), (["--help"], 0), (["show"], 1), (["show", "--json"], 1), (["no"], 1)],
    ids=str,
)
def test_a_short_command_ends_quietly_where_nobody_reads_it(
    prefect_home: Path, tmp_path: Path, arguments: list[str], status: int
) -> None:
    def run(stdout: int, stderr: int) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "flows.cli", *arguments]
        env = environment(prefect_home)
        return subprocess.run(command, cwd=tmp_path, env=env, stdout=stdout, stderr=stderr, timeout=60)

    stdout = unread()
    try:
        done = run(stdout, subprocess.PIPE)
        assert done.returncode == status
        assert b"Traceback" not in done.stderr and b"ipe" not in done.stderr, done.stderr
        assert run(stdout, stdout).returncode == status
    finally:
        os.close(stdout)
