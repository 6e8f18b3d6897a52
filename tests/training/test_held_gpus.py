"""Two runs never share a card: the second waits, and a process that is killed gives its cards back."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs.stopping import StoppedByFile
from traceforge_core.training import held_gpus, launch, seats, stages
from traceforge_core.training.held_gpus import free_first, held

REPOSITORY = Path(__file__).parents[2]
HOLD = "import sys, time; from traceforge_core.training.held_gpus import held\n"
HOLD += "with held(sys.argv[1:]): print('held', flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks of these tests alone, also in the processes that they start."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(held_gpus, "POLL_SECONDS", 0.01)


@pytest.fixture
def other_run() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Another process that holds these cards until it is killed."""
    started = []

    def hold(*gpus: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, *gpus]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.wait()


def test_a_second_run_waits_and_a_killed_process_gives_its_card_back(
    other_run: Callable[..., subprocess.Popen[str]], caplog: pytest.LogCaptureFixture
) -> None:
    other = other_run("GPU-a", "GPU-b")
    got: list[float] = []

    def wait() -> None:
        with held(["GPU-b", "GPU-c"]):
            got.append(time.monotonic())

    waiting = threading.Thread(target=wait)
    with caplog.at_level(logging.INFO, logger="traceforge_core"):
        waiting.start()
        deadline = time.monotonic() + 30
        while "is being used" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.02)
    assert not got and f"GPU GPU-b is being used by a run of process {other.pid}" in caplog.text
    killed = time.monotonic()
    other.kill()
    waiting.join(timeout=10)
    assert got and got[0] >= killed


def test_cards_that_nobody_uses_come_first(
    other_run: Callable[..., subprocess.Popen[str]],
    inputs: dict[str, Path],
    configure: Callable[..., RunConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other_run("4")
    assert free_first(["4", "7", "9"]) == ["7", "9", "4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,9")
    monkeypatch.setattr(seats, "_torch_lacks_cuda", lambda: False)
    job = stages.preference_job("branch_parallel", configure(model__device="cuda"), inputs, tmp_path / "out")
    assert seats.seats(job) == ["7", "9"]


def test_whoever_waits_can_be_stopped_and_does_not_wait_for_ever(
    other_run: Callable[..., subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_run("GPU-a")
    (tmp_path / "STOP").touch()
    with pytest.raises(StoppedByFile, match="waiting for GPU GPU-a"), held(["GPU-a"], tmp_path / "STOP"):
        pass
    monkeypatch.setattr(held_gpus, "WAIT_SECONDS", 0.05)
    with pytest.raises(TraceForgeError, match=r"did not come free.*traceforge stop"), held(["GPU-a"]):
        pass


def test_the_cpu_is_there_for_everybody_and_workers_may_share_a_card_of_their_own_run() -> None:
    with held(["", ""]), held([""]):
        pass
    with held(["GPU-a", "GPU-a"]):
        assert free_first(["GPU-a", "GPU-b"]) == ["GPU-b", "GPU-a"]
    assert free_first(["GPU-a", "GPU-b"]) == ["GPU-a", "GPU-b"]


@pytest.mark.slow
def test_workers_begin_only_when_their_card_is_free(
    other_run: Callable[..., subprocess.Popen[str]],
    inputs: dict[str, Path],
    configure: Callable[..., RunConfig],
    tmp_path: Path,
) -> None:
    other = other_run("GPU-a")
    job = stages.sft_job(configure(sft__max_steps=1), inputs, tmp_path / "out")
    begun: list[float] = []
    training = threading.Thread(
        target=launch.launch, args=(job, ["GPU-a"]), kwargs={"on_line": lambda *_: begun.append(time.monotonic())}
    )
    training.start()
    time.sleep(1.0)
    assert not begun
    freed = time.monotonic()
    other.kill()
    training.join(timeout=120)
    assert begun and begun[0] > freed and (job.out_dir / "adapter").is_dir()
