"""Killed at any step and started again, a stage ends with the same bits as one that was never interrupted."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceforge_core.config import RunConfig
from traceforge_core.runs import Inputs, Run, run_stage
from traceforge_core.runs.stopping import StoppedByFile
from traceforge_core.training import stages
from traceforge_core.training.job import Job
from traceforge_core.training.records import StepRecord, read_records
from traceforge_core.training.watch import WorkerError

pytestmark = pytest.mark.slow
Configure = Callable[..., RunConfig]
TIMINGS = ("seconds", "peak_memory_mib", "exchange_seconds")


@pytest.mark.parametrize("kind", ["sft", "oracle", "branch_parallel", "shared_prefix"])
def test_a_run_killed_at_a_random_step_ends_bit_for_bit_like_an_unbroken_one(
    kind: str, inputs: dict[str, Path], configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 14 rows in micro-batches of 2, two a step, twice over: steps end in the middle of epochs, and an epoch in a short
    # step.
    changes = {"batch_size": 2, "gradient_accumulation": 2, "epochs": 2, "max_steps": None, "warmup_steps": 2}
    if kind == "branch_parallel" and random.random() < 0.5:
        changes |= {"gradient_accumulation": 1, "replicas": 2}
        print("on four workers")
    section = "sft" if kind == "sft" else "preference"
    config = configure(**{f"{section}__{name}": value for name, value in changes.items()})
    step = random.randint(2, 8)
    print(f"killed at step {step}")

    whole = make_job(kind, config, inputs, tmp_path / "whole")
    stages.run_job(whole)

    broken = make_job(kind, config, inputs, tmp_path / "broken")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("FAULTY_STEP", str(step))
    monkeypatch.setenv("FAULTY_RANK", "0" if kind != "branch_parallel" else str(step % 2))
    killed = {"sft": "KilledSft", "oracle": "KilledOracle", "shared_prefix": "KilledShared"}
    faulty = killed.get(kind, "Killed")
    with pytest.raises(WorkerError, match=r"SIGKILL"):
        stages.run_job(dataclasses.replace(broken, trainer=f"faulty_trainers:{faulty}"))
    assert [record.step for record in read_records(broken.out_dir / "metrics.jsonl")] == list(range(1, step))
    assert not (broken.out_dir / "adapter").exists()
    stages.run_job(broken)

    resumed_from = json.loads((broken.out_dir / "training.json").read_text())["resumed_from"]
    last_saved = (step - 1) // 2 * 2
    assert resumed_from == (f"checkpoint-{last_saved}" if last_saved else None)
    for name in ("adapter/adapter_model.safetensors", *(f"gradients/step-{n:05d}.safetensors" for n in range(1, 6))):
        if kind != "sft" or name.startswith("adapter"):
            assert (broken.out_dir / name).read_bytes() == (whole.out_dir / name).read_bytes(), name
    assert steps_of(broken) == steps_of(whole)
    assert len(steps_of(whole)) == 8


def test_half_a_checkpoint_is_never_resumed_from(inputs: dict[str, Path], configure: Configure, tmp_path: Path) -> None:
    job = make_job("oracle", configure(), inputs, tmp_path / "out")
    torn = job.out_dir / "checkpoints" / "writing.tmp" / "checkpoint-4"
    torn.mkdir(parents=True)
    (torn / "trainer_state.json").write_text("{")
    stages.run_job(job)
    assert json.loads((job.out_dir / "training.json").read_text())["resumed_from"] is None


class Bomb:
    """What a hostile checkpoint holds: reading it with pickle would make a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


def test_a_checkpoint_that_holds_code_is_refused_and_not_run(
    inputs: dict[str, Path], configure: Configure, tmp_path: Path
) -> None:
    import torch

    marker = tmp_path / "it ran"
    torch.save(Bomb(marker), tmp_path / "bomb.pt")
    torch.load(tmp_path / "bomb.pt", weights_only=False)
    assert marker.exists(), "the bomb works where pickles are trusted"
    marker.unlink()

    long = configure(sft__max_steps=4000, sft__schedule="constant")
    job = make_job("sft", long, inputs, tmp_path / "out")

    def stop(_rank: int, line: str) -> None:
        if line.startswith("step 2/"):
            job.stop_file.touch()

    with pytest.raises(StoppedByFile, match=r"stopped after step"):
        stages.run_job(job, on_line=stop)
    job.stop_file.unlink()
    [checkpoint] = (job.out_dir / "checkpoints").glob("checkpoint-*")
    files = {name: (checkpoint / name).read_bytes() for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth")}
    shutil.copy(tmp_path / "bomb.pt", checkpoint / "training_args.bin")
    for bombed in (["rng_state.pth"], list(files)):
        for name, whole in files.items():
            (checkpoint / name).write_bytes((tmp_path / "bomb.pt").read_bytes() if name in bombed else whole)
        with pytest.raises(WorkerError, match=r"[Ww]eights.only"):
            stages.run_job(make_job("sft", configure(sft__max_steps=4000), inputs, job.out_dir))
        assert not marker.exists(), f"{bombed} was run"


def test_a_stage_that_a_file_stopped_has_a_checkpoint_of_its_last_step_and_ends_like_an_unbroken_one(
    inputs: dict[str, Path], configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    run = Run.create(tmp_path / "runs")
    config = configure(preference__checkpoint_steps=100)

    def train(out_dir: Path) -> dict[str, Any]:
        return stages.run_job(make_job("branch_parallel", config, inputs, out_dir))

    def train_slowly(out_dir: Path) -> dict[str, Any]:
        def stop_in_step_four(rank: int, line: str) -> None:
            if line.startswith("step 3/"):
                run.stop_file.touch()

        job = make_job("branch_parallel", config, inputs, out_dir)
        return stages.run_job(dataclasses.replace(job, trainer="faulty_trainers:Slow"), on_line=stop_in_step_four)

    with pytest.raises(StoppedByFile, match="branch_parallel: stopped after step 4 of 6, with a checkpoint"):
        run_stage(run, "branch_parallel", {}, Inputs(), train_slowly, resumable=True)
    partial = run.partial_dir("branch_parallel")
    assert [path.name for path in (partial / "checkpoints").iterdir()] == ["checkpoint-4"]
    assert not (partial / "adapter").exists() and not (partial / "progress.json").exists()

    with pytest.raises(StoppedByFile, match="stopped before it had begun"):  # the file is still there
        run_stage(run, "branch_parallel", {}, Inputs(), train, resumable=True)
    run.stop_file.unlink()
    result = run_stage(run, "branch_parallel", {}, Inputs(), train, resumable=True)
    assert json.loads((result.path / "training.json").read_text())["resumed_from"] == "checkpoint-4"
    train(tmp_path / "whole")
    name = "adapter/adapter_model.safetensors"
    assert (result.path / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def make_job(kind: str, config: RunConfig, inputs: dict[str, Path], out_dir: Path) -> Job:
    if kind == "sft":
        return stages.sft_job(config, inputs, out_dir)
    return stages.preference_job(kind, config, inputs, out_dir)  # type: ignore[arg-type]


def steps_of(job: Job) -> list[StepRecord]:
    records = read_records(job.out_dir / "metrics.jsonl")
    return [dataclasses.replace(record, **dict.fromkeys(TIMINGS, 0.0)) for record in records]
