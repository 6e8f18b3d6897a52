"""Slots that dead runs held, with servers and processes that are really killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.conftest import environment

PROGRAM = """
import logging, sys, time
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
logging.getLogger("httpx").setLevel(logging.WARNING)
from flows.embedded import embedded_api
with embedded_api() as pid:
    from prefect import flow
    from prefect.client.orchestration import get_client
    from flows.gpus import LIMIT, gpus_held

    @flow
    def hold():
        with gpus_held(1):
            print("held", pid, flush=True)
            time.sleep(600)

    with get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name(LIMIT, 1)
        print("taken", client.read_global_concurrency_limit_by_name(LIMIT).active_slots, flush=True)
    hold()
"""


@contextlib.contextmanager
def holder(home: Path, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    env = environment(home, PREFECT_SERVER_CONCURRENCY_MAXIMUM_CONCURRENCY_SLOT_WAIT_SECONDS="1")
    with (
        output.open("wb") as file,
        subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, stdout=file, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def until(output: Path, word: str) -> str:
    deadline = time.monotonic() + 90
    while word not in (text := output.read_text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.1)
    return text


@pytest.mark.slow
def test_a_slot_is_given_back_when_its_holder_is_gone_and_not_before(tmp_path: Path) -> None:
    home = tmp_path / "prefect"
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    with holder(home, first) as holding:
        assert "taken 0" in until(first, "held")
        with holder(home, second) as waiting:
            said = until(second, "Waiting for 1 of the slots")
            assert "taken 1" in said and "prefect gcl update gpu --active-slots 0" in said
            time.sleep(6)  # it has looked for the dead again
            assert "held" not in second.read_text(), "its holder lives"
            holding.kill()
            server = int(until(second, "held").split("held ")[1].split()[0])
            os.kill(server, 9)  # and with it goes the second run, which can no longer release what it holds
            waiting.wait(timeout=60)
    with holder(home, third):
        said = until(third, "held")
    assert "taken 1" in said and "Gave back the slots" in said and "Waiting" not in said
