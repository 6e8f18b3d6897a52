"""`make serve` under test: a server and worker with a Prefect home of their own, started, and gone afterwards.

with serving(tmp_path / "prefect") as served:
    httpx.get(f"{served.url}/api/health")
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.ports import free_port
from tests.python_path import python_path

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Serving:
    """`url` is the server's own, without /api; `env` what another shell needs, but for PREFECT_API_URL; `told` what was
    printed until all was ready."""

    process: subprocess.Popen[str]
    url: str
    env: dict[str, str]
    told: str


@contextlib.contextmanager
def serving(home: Path, **more: str) -> Iterator[Serving]:
    """Everything that `make serve` starts, ready for runs. What is left of it after the block is killed."""
    port = free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {"PREFECT_HOME": str(home), "PYTHONPATH": python_path(REPOSITORY), "OMP_NUM_THREADS": "1"} | more
    with subprocess.Popen(
        [sys.executable, "-m", "deployments.serve"],
        cwd=REPOSITORY,
        env=env | {"PREFECT_SERVER_API_PORT": str(port)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            told, log = "", home / "server.log"
            assert process.stdout is not None
            for line in process.stdout:
                told += line
                if "prefect deployment run" in line:
                    break
            said = log.read_text(encoding="utf-8")[-3000:] if log.is_file() else ""
            assert "prefect deployment run traceforge/full-pipeline" in told, told + said
            yield Serving(process, f"http://127.0.0.1:{port}", env, told)
        finally:
            for each in processes_of(home):
                with contextlib.suppress(psutil.Error):
                    each.kill()


def post(url: str, body: Any) -> Any:
    """What the API answers. A server that is too busy (503) is asked again for half a minute, as Prefect's own clients
    do."""
    deadline = time.monotonic() + 30
    while (answer := httpx.post(url, json=body, timeout=30)).status_code == 503 and time.monotonic() < deadline:
        time.sleep(1)
    answer.raise_for_status()
    return answer.json()


def processes_of(home: Path) -> list[psutil.Process]:
    """Everything that was started with this PREFECT_HOME, but not this test."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get("PREFECT_HOME") == str(home)
            if ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until it is so. Fails after that many seconds."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)
