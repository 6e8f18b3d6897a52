"""Which GPUs workers get, what their environment holds, and workers that torchrun starts instead."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.adapters import hash_adapter
from traceforge_core.training import launch, stages
from traceforge_core.training.job import Job

Configure = Callable[..., RunConfig]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None, int], None]:
    """Pretend that so many GPUs are there, and that CUDA_VISIBLE_DEVICES says so."""

    def pretend(visible: str | None, count: int) -> None:
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(launch, "_gpu_count", lambda: count)
        monkeypatch.setattr(launch, "_torch_lacks_cuda", lambda: False)

    return pretend


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [
        (None, 2, ["0", "1"]),
        (None, 0, []),
        ("", 2, []),
        ("3,1", 4, ["3", "1"]),
        ("GPU-aa, GPU-bb", 4, ["GPU-aa", "GPU-bb"]),
        ("0,-1,1", 4, ["0"]),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_see(
    visible: str | None, count: int, expected: list[str], gpus: Callable[[str | None, int], None]
) -> None:
    gpus(visible, count)
    assert launch.visible_gpus() == expected


def test_a_torch_without_cuda_sees_no_gpu_and_says_why(
    gpus: Callable[[str | None, int], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpus(None, 1)
    monkeypatch.setattr(launch, "_torch_lacks_cuda", lambda: True)
    with caplog.at_level(logging.WARNING, logger="traceforge_core"):
        assert launch.visible_gpus() == []
    assert "built without CUDA" in caplog.text


def test_each_worker_gets_a_gpu_of_its_own_or_shares_one_when_told_to(
    gpus: Callable[[str | None, int], None], inputs: dict[str, Path], configure: Configure, tmp_path: Path
) -> None:
    gpus("4,7", 8)
    job = stages.preference_job("branch_parallel", configure(model__device="cuda"), inputs, tmp_path)
    assert (launch.seats(job), job.transport) == (["4", "7"], "nccl")
    gpus("4", 8)
    shared = stages.preference_job("branch_parallel", configure(model__device="cuda"), inputs, tmp_path)
    assert shared.transport == "gloo"  # NCCL refuses two processes on one GPU
    assert launch.seats(shared, share_gpu=True) == ["4", "4"]
    with pytest.raises(TraceForgeError, match=r"needs 2 GPUs, one a worker, and 1 can be used here"):
        launch.seats(shared)
    with pytest.raises(TraceForgeError, match=r"needs a GPU of its own for every worker"):
        stages.preference_job(
            "branch_parallel", configure(model__device="cuda", preference__transport="nccl"), inputs, tmp_path
        )


def test_a_job_is_the_same_after_writing_and_reading(
    inputs: dict[str, Path], configure: Configure, tmp_path: Path
) -> None:
    job = stages.preference_job("branch_parallel", configure(preference__replicas=2), inputs, tmp_path)
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job
    assert job.workers == 4
    assert job.describe(3) == "worker 3 of 4 (rejected, replica 1)"


def test_a_missing_file_of_pairs_is_named(inputs: dict[str, Path], configure: Configure, tmp_path: Path) -> None:
    from traceforge_core.training.pairs import PairDataset

    with pytest.raises(TraceForgeError, match=r"Cannot read the preference pairs in .*nowhere"):
        PairDataset(tmp_path / "nowhere.parquet")


@pytest.mark.slow
def test_workers_started_by_torchrun_train_the_same(
    inputs: dict[str, Path], configure: Configure, tmp_path: Path
) -> None:
    config = configure(preference__replicas=2, preference__max_steps=3)
    listening: set[str] = set()

    def look(_rank: int, line: str) -> None:
        if "is connected" in line:
            for worker in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    sockets = worker.net_connections("inet")
                    listening.update(each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN)

    stages.run_job(stages.preference_job("branch_parallel", config, inputs, tmp_path / "launched"), on_line=look)
    assert listening <= {"127.0.0.1", "::1"} and listening, "workers of one host are reached from that host only"
    job = stages.preference_job("branch_parallel", config, inputs, tmp_path / "torchrun")
    job.out_dir.mkdir()
    job.write(tmp_path / "job.json")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    worker = ["-m", "traceforge_core.training.worker", str(tmp_path / "job.json")]
    root = Path(__file__).parents[2]
    subprocess.run([*torchrun, "4", *worker], check=True, cwd=root, timeout=120)
    assert hash_adapter(job.out_dir / "adapter") == hash_adapter(tmp_path / "launched" / "adapter")

    wrong = subprocess.run([*torchrun, "2", *worker], cwd=root, timeout=120, capture_output=True, text=True)
    assert wrong.returncode != 0
    assert "This job has 4 workers (2 branches × 2 replicas), but 2 were started" in wrong.stdout + wrong.stderr
