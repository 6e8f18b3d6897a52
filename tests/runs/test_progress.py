"""What stages tell of how far they are, and what is read from it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from traceforge_core.config import load_config
from traceforge_core.datasets import build
from traceforge_core.runs.progress import FILE_NAME, Progress, ProgressFile, forget_progress, progress, read_progress
from traceforge_core.trajectories import ingest, shards


def test_a_block_tells_how_far_it_is_and_leaves_nothing_behind(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None
    with pytest.raises(ZeroDivisionError), progress(tmp_path, "making samples", "samples", total=40) as told:
        told.add(10, pairs=3)
        told.write()
        seen = read_progress(tmp_path)
        assert seen is not None and (seen.done, seen.total, seen.percent) == (10, 40, 25.0)
        assert seen.text() == "10 of 40 samples, 3 pairs"
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_processes_that_share_the_work_are_added_up_and_what_was_there_before_counts_for_no_speed(
    tmp_path: Path,
) -> None:
    (tmp_path / ".shards").mkdir()
    told = ProgressFile(tmp_path / FILE_NAME, "reading", "bytes", total=100e6, done=40e6)
    began = json.loads((tmp_path / FILE_NAME).read_text())
    (tmp_path / FILE_NAME).write_text(json.dumps(began | {"began": began["began"] - 10}))
    for number in range(2):
        part = ProgressFile(tmp_path / ".shards" / f"shard-{number}.progress.json", "reading", "bytes")
        part.add(10e6, files=4)
        part.write()
    seen = read_progress(tmp_path)
    assert seen is not None and seen.percent == 60.0
    assert seen.rate == pytest.approx(2e6, rel=0.05) and seen.seconds_left == pytest.approx(20, rel=0.05)
    assert seen.text() == "60.0 of 100.0 MB, 8 files, 2.0 MB/s, 20 s left"
    told.remove()
    assert read_progress(tmp_path) is None


def test_training_is_read_from_its_step_log(tmp_path: Path) -> None:
    ProgressFile(tmp_path / FILE_NAME, "starting", "steps").doing("at step 1, micro-batch 1")
    first = read_progress(tmp_path)
    assert first is not None and first.text() == "at step 1, micro-batch 1" and first.percent is None
    steps = [
        {
            "step": n, "total_steps": 500, "loss": 1 / n, "margin": 0.25, "seconds": 2.0, "tokens": 3000,
            "peak_memory_mib": 2048.0, "weights_sketch": [0.123456789] * 64,
        }
        for n in range(1, 301)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"step": 301, "lo')
    seen = read_progress(tmp_path)
    assert seen is not None and (seen.done, seen.total) == (300, 500)
    assert seen.text() == "300 of 500 steps, loss 0.003, margin 0.250, 1,500 tokens/s, peak 2.0 GiB, 6 min left"


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"doing": "x"}', "\x00\xff"])
def test_a_file_that_is_torn_or_strange_is_no_progress(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_text(content, encoding="latin-1")
    assert read_progress(tmp_path) is None
    (tmp_path / "runs").mkdir()
    ProgressFile(tmp_path / "runs" / FILE_NAME, "starting")
    (tmp_path / f"{FILE_NAME}.4711.tmp").write_text("{")  # by a process that was killed while it wrote
    forget_progress(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_is_gone_does_not_stop_the_work(tmp_path: Path) -> None:
    with progress(tmp_path / "gone", "working", "things") as told:
        told.add()
    assert not (tmp_path / "gone").exists()


def test_ingest_and_datasets_tell_what_they_do_while_they_do_it(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "SHARD_BYTES", 50_000)  # several shards, of several files each
    monkeypatch.setattr(shards, "SHARD_BYTES", 50_000)
    monkeypatch.setattr("traceforge_core.runs.progress.WRITE_SECONDS", 0.0)
    config = load_config(assignments=["ingest.workers=1"])

    out = tmp_path / "ingest"
    out.mkdir()
    seen = watched(out, lambda: ingest.ingest(config, {}, out))
    reading = [each for each in seen if each.unit == "bytes"]
    assert {each.doing for each in seen} >= {"reading trajectories"} and reading
    percents = [each.percent or 0 for each in reading]
    assert percents == sorted(percents) and max(percents) > 50
    assert max(each.counts.get("trajectories", 0) for each in reading) > 10
    assert max(each.counts.get("files", 0) for each in reading) > 10

    made = tmp_path / "datasets"
    made.mkdir()
    seen = watched(made, lambda: build.build_datasets(config, {"ingest": out, "model": tiny_model_dir}, made))
    assert {each.doing for each in seen} >= {"making SFT samples", "making preference pairs"}
    samples = [each for each in seen if each.doing == "making SFT samples"]
    assert max(each.percent or 0 for each in samples) > 50 and samples[-1].counts["samples"] > 5
    for folder in (out, made):
        assert not list(folder.rglob("*progress.json*"))


def watched(folder: Path, work: object) -> list[Progress]:
    """Everything that another thread reads while the work goes on."""
    seen: list[Progress] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            if (told := read_progress(folder)) is not None:
                seen.append(told)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()  # type: ignore[operator]
    finally:
        done.set()
        watcher.join()
    return seen
