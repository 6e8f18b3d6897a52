"""Trackers beside the step log, each with a real training: what the tracker's own reader finds is what was trained."""

from __future__ import annotations

import importlib.util
import os
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import Run
from traceforge_core.training import stages
from traceforge_core.training.records import read_records
from traceforge_core.training.trackers import require_trackers

Configure = Callable[..., RunConfig]
OURS = ("WANDB", "MLFLOW", "TRACKIO", "TENSORBOARD")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith(OURS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # no key of whoever runs the tests
    monkeypatch.chdir(tmp_path)


def tensorboard_losses(run: Run) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "trackers" / "tensorboard" / "sft"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars("train/loss")}


def wandb_losses(run: Run) -> dict[int, float]:
    from wandb.proto import wandb_internal_pb2

    [file] = (run.path / "trackers" / "wandb").glob("offline-run-*/*.wandb")
    found: dict[int, float] = {}
    for data in leveldb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if "train/loss" in row:
            found[int(float(row["train/global_step"]))] = float(row["train/loss"])
    return found


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a W&B file: LevelDB's log format after 7 bytes, a record in pieces of one block of 32 KiB each."""
    position, record = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def mlflow_losses(run: Run) -> dict[int, float]:
    with sqlite3.connect(run.path / "trackers" / "mlflow.db") as database:
        return dict(database.execute("select step, value from metrics where key = 'loss'"))


def trackio_losses(run: Run) -> dict[int, float]:
    import json

    [file] = (run.path / "trackers" / "trackio").glob("traceforge*.db")
    with sqlite3.connect(file) as database:
        rows = [json.loads(metrics) for (metrics,) in database.execute("select metrics from metrics")]
    return {row["train/global_step"]: row["train/loss"] for row in rows if "train/loss" in row}


READERS = {
    "tensorboard": tensorboard_losses,
    "wandb": wandb_losses,
    "mlflow": mlflow_losses,
    "trackio": trackio_losses,
}


@pytest.mark.slow
@pytest.mark.usefixtures("clean_environment")
@pytest.mark.parametrize("tracker", READERS)
def test_a_tracker_has_every_step_in_the_folder_of_the_run(
    tracker: str, inputs: dict[str, Path], configure: Configure, tmp_path: Path
) -> None:
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed; it is an extra")
    run = Run.create(tmp_path / "runs", "tracked")
    job = stages.sft_job(configure(sft__report_to=[tracker], sft__max_steps=4), inputs, run.partial_dir("sft"))
    stages.run_job(job)
    trained = {record.step: record.loss for record in read_records(job.out_dir / "metrics.jsonl")}
    tracked = READERS[tracker](run)
    assert list(trained) == [1, 2, 3, 4] and {*tracked} >= {*trained}
    # transformers rounds what it logs.
    assert {step: tracked[step] for step in trained} == pytest.approx(trained, abs=1e-3)
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} <= {"runs"}
    assert not any(tracker in path.name for path in job.out_dir.rglob("*")), "looking at it changes no stage"


def test_a_tracker_that_is_not_installed_is_said_at_once_with_what_to_install(
    configure: Configure, inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else there(name, *more)
    )
    config = configure(preference__report_to=["tensorboard", "wandb"])
    began = time.monotonic()
    with pytest.raises(TraceForgeError, match=r"preference\.report_to names wandb, .* pip install wandb"):
        require_trackers(config)
    assert time.monotonic() - began < 1
    job = stages.preference_job("oracle", config, inputs, tmp_path / "out")
    with pytest.raises(TraceForgeError, match="not installed"):
        stages.run_job(job)
    assert not (tmp_path / "out").exists()
    require_trackers(configure())
