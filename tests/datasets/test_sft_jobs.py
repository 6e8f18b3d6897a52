"""Samples made by several processes: the same as by one, and clear when one dies."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceforge_core.config import load_config
from traceforge_core.datasets import sft_jobs
from traceforge_core.datasets.build import build_datasets
from traceforge_core.datasets.sft_jobs import plan
from traceforge_core.datasets.splits import Side
from traceforge_core.errors import TraceForgeError
from traceforge_core.trajectories.model import Trajectory

Make = Callable[..., Trajectory]


@pytest.fixture
def corpus(make_run: Make, ingested: Callable[[list[Trajectory]], Path]) -> Path:
    runs = []
    for n in range(20):
        steps = [(f"cat {n} {'very-long-name ' * (300 if n % 10 == 0 else 1)}", 0), (f"sed {n}", 1), (f"sed -i {n}", 0)]
        runs += [make_run(f"case{n}", "a", steps, "resolved"), make_run(f"case{n}", "b", steps[:1], "unresolved")]
    return ingested(runs)


@pytest.fixture
def small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of three trajectories, and a corpus of any size is worth further processes."""
    monkeypatch.setattr(sft_jobs, "VERIFY_EVERY", 3)
    monkeypatch.setattr(sft_jobs, "WORTH_WORKERS", 0)


def build(corpus: Path, model_dir: Path, out: Path, *assignments: str) -> dict[str, bytes]:
    """Every file that the stage leaves, by name."""
    out.mkdir()
    base = ["datasets.sft.max_length=900", "datasets.preference.max_length=9000", "datasets.sft.max_samples=null"]
    build_datasets(load_config(assignments=[*base, *assignments]), {"ingest": corpus, "model": model_dir}, out)
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (2, ["datasets.sft.style=blocks"]),
        (3, ["datasets.sft.style=native", "datasets.sft.loss_on=everything", "datasets.sft.max_samples=16"]),
    ],
)
def test_the_files_are_the_same_bytes_whatever_the_number_of_processes(
    workers: int, settings: list[str], corpus: Path, model_dir: Path, tmp_path: Path, small_jobs: None
) -> None:
    alone = build(corpus, model_dir, tmp_path / "alone", "datasets.workers=1", *settings)
    together = build(corpus, model_dir, tmp_path / "together", f"datasets.workers={workers}", *settings)
    assert set(alone) == {
        "report.json", "report.md",
        *(f"{kind}/{side}.parquet" for kind in ("sft", "preference") for side in ("train", "held_out")),
    }  # fmt: skip
    assert together == alone
    assert b'"dropped_samples": {}' not in alone["report.json"]  # those are counted alike too


def test_what_max_samples_keeps_of_long_trajectories_and_what_it_leaves_are_all_that_could_be_made(
    make_run: Make, ingested: Callable[[list[Trajectory]], Path], model_dir: Path, tmp_path: Path
) -> None:
    """Of style native: each trajectory is one candidate, and makes several samples."""
    steps = [(f"cat {n} {'very-long-name ' * 40}", n % 2) for n in range(4)]
    corpus = ingested([make_run(f"case{n}", "a", steps) for n in range(3)])

    def made(limit: str) -> tuple[int, int]:
        out = tmp_path / limit
        build(corpus, model_dir, out, "datasets.sft.style=native", f"datasets.sft.max_samples={limit}")
        report = json.loads((out / "report.json").read_text())
        left = report["dropped_samples"].pop("over max_samples", 0)
        assert report["dropped_samples"] == {}
        return report["sft_samples"] + report["sft_held_out"], left

    whole, _ = made("null")
    assert whole > 2 * 3
    assert made("5") == (5, whole - 5)
    assert made("50") == (whole, 0)


@pytest.mark.parametrize("workers", [1, 2])
def test_of_long_trajectories_each_gives_a_sample_before_any_gives_a_second(
    workers: int, make_run: Make, ingested: Callable[[list[Trajectory]], Path], model_dir: Path, tmp_path: Path,
    small_jobs: None,
) -> None:  # fmt: skip
    steps = [(f"cat {n} {'very-long-name ' * 40}", n % 2) for n in range(6)]
    corpus = ingested([make_run(f"case{n:02}", "a", steps[: 6 - n % 3]) for n in range(12)])

    def samples_of(limit: str) -> Counter[str]:
        out = tmp_path / limit
        settings = ["datasets.sft.style=native", f"datasets.sft.max_samples={limit}", f"datasets.workers={workers}"]
        build(corpus, model_dir, out, *settings)
        files = [pq.read_table(out / "sft" / f"{side}.parquet") for side in ("train", "held_out")]
        found = [sample for file in files for sample in file["sample_id"].to_pylist()]
        assert len(found) == len(set(found))
        return Counter(case for file in files for case in file["case"].to_pylist())

    whole = samples_of("null")
    assert min(whole.values()) > 2, "each makes several"
    assert sorted(samples_of("4")) == ["case02", "case05", "case08", "case11"]
    assert set(samples_of("12").values()) == {1}
    some = samples_of("18")
    assert set(some.values()) == {1, 2}
    assert [case for case in sorted(some) if some[case] == 2] == [f"case{n:02}" for n in range(1, 12, 2)]
    assert samples_of(str(whole.total() - 1)).total() == whole.total() - 1


def test_a_worker_that_dies_is_an_error_that_says_what_to_set(
    corpus: Path, model_dir: Path, tmp_path: Path, small_jobs: None
) -> None:
    done = threading.Event()

    def kill_one() -> None:
        while not done.is_set():
            for child in psutil.Process().children():
                if "spawn_main" in " ".join(child.cmdline()):
                    child.kill()
                    return
            time.sleep(0.01)

    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        with pytest.raises(TraceForgeError, match=r"tokenising SFT samples died.*datasets\.workers"):
            build(corpus, model_dir, tmp_path / "out", "datasets.workers=2")
    finally:
        done.set()
        killer.join()


def test_a_small_corpus_starts_no_process(
    corpus: Path, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("started processes")

    monkeypatch.setattr(sft_jobs, "in_order", refuse)
    build(corpus, model_dir, tmp_path / "out", "datasets.workers=8")


@given(
    shape=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12 << 20)), max_size=120),
    data=st.data(),
)
def test_jobs_hold_every_chosen_candidate_once_and_in_order(shape: list[tuple[int, int]], data: st.DataObject) -> None:
    counts, sizes = [count for count, _ in shape], [size for _, size in shape]
    total = sum(counts)
    chosen = sorted(data.draw(st.sets(st.integers(0, total - 1)))) if total else []
    firsts = [0, *accumulate(counts)]
    found: list[int] = []
    sides: list[Side] = ["held_out" if n % 3 else "train" for n in range(len(shape))]
    for job in plan(np.array(chosen, np.int64), counts, sizes, sides, lambda _: ()):
        assert job.sides == tuple(sides[n] for n in job.trajectories)
        of_job = [firsts[n] + turn for n in job.trajectories for turn in range(counts[n])]
        found += [number for place, number in enumerate(of_job) if job.wanted is None or place in job.wanted]
        assert len(job.trajectories) <= sft_jobs.VERIFY_EVERY
        assert job.characters == sum(sizes[n] for n in job.trajectories)
        assert sum(sizes[n] for n in job.trajectories[:-1]) < sft_jobs.JOB_CHARACTERS
    assert found == chosen
