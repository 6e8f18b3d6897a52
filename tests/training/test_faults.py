"""Workers that die, hang, raise, run out of memory, or make a NaN: one clear error, soon, and nobody left behind."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from traceforge_core.config import RunConfig
from traceforge_core.modeling.adapters import hash_adapter
from traceforge_core.runs.stopping import StoppedByFile
from traceforge_core.training import stages
from traceforge_core.training.job import Job
from traceforge_core.training.records import read_records
from traceforge_core.training.watch import WorkerError

pytestmark = pytest.mark.slow
Configure = Callable[..., RunConfig]
MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(inputs: dict[str, Path], configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeJob:
    """A Branch-Parallel job with a trainer out of faulty_trainers.py."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)

    def make(trainer: str, out_dir: Path | None = None, **changes: object) -> Job:
        job = stages.preference_job("branch_parallel", configure(**changes), inputs, out_dir or tmp_path / "out")
        return dataclasses.replace(job, trainer=f"faulty_trainers:{trainer}")

    return make


def workers_of(pid: int) -> list[psutil.Process]:
    """Worker processes below that process."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if "traceforge_core.training.worker" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def test_a_killed_worker_is_named_with_its_signal_and_its_log(make_job: MakeJob) -> None:
    with pytest.raises(WorkerError) as error:
        stages.run_job(make_job("Killed"))
    assert error.value.rank == 1 and error.value.signal == "SIGKILL"
    message = str(error.value)
    assert "worker 1 of 2 (rejected) was ended by SIGKILL" in message
    assert "rank1.log" in message and "Loaded" in message  # the log's last lines
    assert workers_of(os.getpid()) == []


def test_a_worker_that_raises_in_the_backward_is_blamed_and_not_its_peer(make_job: MakeJob) -> None:
    with pytest.raises(WorkerError) as error:
        stages.run_job(make_job("RaisesInBackward"))
    assert error.value.rank == 1
    assert "the backward broke" in str(error.value)
    assert workers_of(os.getpid()) == []


def test_a_hung_worker_is_ended_within_ten_seconds_of_being_found_out(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTY_RANK", "0")
    job = make_job("Hangs", preference__hang_seconds=20)
    with pytest.raises(WorkerError, match=r"worker 0 of 2 \(chosen\) showed no progress for") as error:
        stages.run_job(job)
    assert "step 2" in str(error.value)  # what it last did
    last_step = (job.out_dir / "metrics.jsonl").stat().st_mtime
    assert time.time() - last_step < 20 + 2 + 10
    assert workers_of(os.getpid()) == []


def test_running_out_of_gpu_memory_says_what_to_change(make_job: MakeJob) -> None:
    with pytest.raises(WorkerError, match=r"GPU memory ran out.*20.00 GiB.*max_length"):
        stages.run_job(make_job("OutOfMemory"))


def test_weights_that_drift_apart_stop_the_run(make_job: MakeJob) -> None:
    with pytest.raises(WorkerError, match=r"drifted apart by step 3"):
        stages.run_job(make_job("Drifts"))


@pytest.mark.parametrize("trainer", ["NanScore", "InfiniteGradient"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_nan_or_inf_names_the_pair_and_changes_no_weight(
    trainer: str, rank: str, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULTY_RANK", rank)
    monkeypatch.setenv("FAULTY_PAIR", "pair-7")
    job = make_job(trainer, preference__max_steps=7)
    with pytest.raises(WorkerError, match=r"pair pair-7\b.* step \d|step \d+ \(pair pair-7\)") as error:
        stages.run_job(job)
    step = int(re.search(r"step (\d+)", str(error.value)).group(1))  # type: ignore[union-attr]
    assert [record.step for record in read_records(job.out_dir / "metrics.jsonl")] == list(range(1, step))
    for name in ("rank0.log", "rank1.log"):  # both ranks stopped there, by themselves
        assert "pair-7" in (job.out_dir / "logs" / name).read_text()


@pytest.mark.parametrize(
    ("trainer", "what"),
    [("OtherBaseWeights", "base weights"), ("OtherDataOrder", "data order"), ("OtherTokenizer", "tokenizer")],
)
def test_workers_that_start_apart_are_stopped_before_the_first_step(trainer: str, what: str, make_job: MakeJob) -> None:
    job = make_job(trainer)
    with pytest.raises(WorkerError, match=rf"{what}: differs from rank 0 on worker 1 of 2 \(rejected\)") as error:
        stages.run_job(job)
    assert str(error.value).count("differs") == 1
    assert not (job.out_dir / "metrics.jsonl").exists()


def test_every_worker_starts_from_the_adapter_of_rank_0(make_job: MakeJob, tmp_path: Path) -> None:
    stages.run_job(make_job("OtherAdapter", tmp_path / "other"))
    stages.run_job(dataclasses.replace(make_job("-", tmp_path / "clean"), trainer=stages.TRAINERS["branch_parallel"]))
    assert hash_adapter(tmp_path / "other" / "adapter") == hash_adapter(tmp_path / "clean" / "adapter")


def test_a_stop_file_ends_the_stage(make_job: MakeJob) -> None:
    job = make_job("Slow")
    job.out_dir.mkdir()

    def stop(rank: int, line: str) -> None:
        if line.startswith("step 2/"):
            (job.out_dir / "STOP").touch()

    with pytest.raises(StoppedByFile, match=r"stopped after step 3 of \d+, with a checkpoint, because .*STOP is there"):
        stages.run_job(job, on_line=stop)
    assert workers_of(os.getpid()) == []
    assert (job.out_dir / "checkpoints" / "checkpoint-3").is_dir()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_no_worker_outlives_its_launcher(how: signal.Signals, make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job("Slow", preference__max_steps=7)
    job.out_dir.mkdir()
    job.write(tmp_path / "job.json")
    script = f"""
        from pathlib import Path
        from traceforge_core.training.job import Job
        from traceforge_core.training.stages import run_job
        run_job(Job.read(Path({str(tmp_path / "job.json")!r})))
    """
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[2]
    )
    try:
        metrics = job.out_dir / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and read_records(metrics), 60, "the first step")
        workers = workers_of(launcher.pid)
        assert len(workers) == 2
        launcher.send_signal(how)
        launcher.wait(10)
        wait_for(lambda: not any(worker.is_running() for worker in workers), 10, "the workers' end")
        assert launcher.returncode != 0
        assert not (job.out_dir / "adapter").exists()
    finally:
        launcher.kill()
