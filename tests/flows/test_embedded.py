"""The embedded Prefect server: it is there for one command and then gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.python_path import python_path

REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
import sys, time
from flows.embedded import embedded_api
with embedded_api() as pid:
    from prefect.client.orchestration import get_client
    with get_client(sync_client=True) as client:
        client.read_flows(limit=1)
        print(pid, client.api_url, flush=True)
    if sys.argv[1] == "wait":
        time.sleep(600)
print("left", flush=True)
"""
pytestmark = pytest.mark.slow


def start(home: Path, how: str, under: Sequence[str] = (), **env: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return subprocess.Popen(
        [*under, sys.executable, "-c", PROGRAM, how],
        env=clean | {"PREFECT_HOME": str(home), "PYTHONPATH": python_path(REPOSITORY)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def is_gone(pid: int, seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_it_listens_on_loopback_only_and_is_gone_afterwards(prefect_home: Path) -> None:
    with start(prefect_home, "wait") as process:
        assert process.stdout is not None
        line = process.stdout.readline().split()
        server = psutil.Process(int(line[0]))
        addresses = {c.laddr.ip for c in server.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert addresses == {"127.0.0.1"} and line[1].startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        process.wait(timeout=30)
    assert is_gone(int(line[0]))


def test_it_starts_and_ends_without_a_word(prefect_home: Path) -> None:
    out, err = start(prefect_home, "leave").communicate(timeout=120)
    pid, _, left = out.split()
    assert left == "left" and err == ""
    assert is_gone(int(pid))


def test_it_dies_with_a_parent_that_is_killed(prefect_home: Path) -> None:
    with start(prefect_home, "wait") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[0])
        process.kill()
    assert is_gone(pid)


def test_a_machine_without_a_loopback_interface_is_told_so_at_once(prefect_home: Path) -> None:
    alone = ["unshare", "--net"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("a network of one's own needs root")
    process = start(prefect_home, "leave", under=alone)
    _, err = process.communicate(timeout=60)  # it used to try for two minutes
    assert process.returncode == 1
    assert "This machine cannot reach itself at 127.0.0.1" in err and "ip link set lo up" in err


def test_a_server_that_ends_while_it_starts_is_told_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("from another day\n")
    (tmp_path / "uvicorn.py").write_text("raise SystemExit('no uvicorn today')\n")
    process = start(tmp_path, "leave", PYTHONPATH=python_path(REPOSITORY, tmp_path))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Prefect's embedded server ended with exit status 1. Its log, " in err
    assert 'ends with "no uvicorn today".' in err and "PREFECT_API_URL" in err


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = start(tmp_path / "file" / "home", "leave")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "where Prefect keeps its database" in err and "PREFECT_HOME" in err
