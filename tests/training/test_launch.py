"""Which GPUs workers get, what their environment holds, and workers that torchrun starts instead."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.adapters import hash_adapter
from traceforge_core.training import stages
from traceforge_core.training.job import Job

Configure = Callable[..., RunConfig]


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

    other = configure(preference__replicas=2, preference__learning_rate=0.5, model__lora__r=4)
    dataclasses.replace(job, config=other, adapter=None, out_dir=tmp_path / "other").write(tmp_path / "other.json")
    (tmp_path / "other").mkdir()
    chosen = "import os, sys; sys.argv[1] += ['job', 'job', 'other', 'job'][int(os.environ['RANK'])] + '.json'"
    (tmp_path / "apart.py").write_text(
        f"{chosen}\nfrom traceforge_core.training.worker import main\nmain(sys.argv[1])\n"
    )
    apart = subprocess.run(
        [*torchrun, "4", str(tmp_path / "apart.py"), f"{tmp_path}/"],
        cwd=root, timeout=120, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    assert apart.returncode != 0 and not (tmp_path / "other" / "metrics.jsonl").exists()
    for what in ("adapter's shape", "config"):
        assert f"{what}: differs from rank 0 on worker 2 of 4 (chosen, replica 1)" in apart.stdout + apart.stderr

    wrong = subprocess.run([*torchrun, "2", *worker], cwd=root, timeout=120, capture_output=True, text=True)
    assert wrong.returncode != 0
    assert "This job has 4 workers (2 branches × 2 replicas), but 2 were started" in wrong.stdout + wrong.stderr
