"""Which runs may go, what that frees, and that the latest good ones stay."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import Inputs, Run, list_runs, run_stage
from traceforge_core.runs.housekeeping import freed, on_disk, plan_pruning, prune, survey
from traceforge_core.runs.side_by_side import differences

SIZE = 1 << 20


def make(
    runs_dir: Path, run_id: str, days_ago: float, *stages: str, verdict: str = "pass", shared: bool = False
) -> Run:
    """A run with these stages, of 1 MiB each; `shared`: the same bytes as every other shared one."""
    run = Run.create(runs_dir, run_id)
    run.save_config({"sft": {"seed": days_ago}, "name": "equal"})
    for stage in stages:

        def fill(out_dir: Path, stage: str = stage) -> dict[str, Any]:
            (out_dir / "data.bin").write_bytes(os.urandom(SIZE))
            return {"verdict": verdict} if stage == "compare" else {}

        run_stage(run, stage, {} if shared else {"of": run_id}, Inputs(), fill)
    then = time.time() - days_ago * 86400
    os.utime(run.path / "config.json", (then, then))
    return run


def names(held: Any) -> list[str]:
    return [each.run.run_id for each in held]


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    make(folder, "agreed-long-ago", 90, "ingest", "sft", "compare")
    make(folder, "agreed", 60, "ingest", "sft", "compare")
    make(folder, "trained", 50, "ingest", "sft")
    make(folder, "disagreed", 40, "ingest", "oracle", "compare", verdict="fail")
    make(folder, "only-data", 20, "ingest")
    make(folder, "mistyped", 0)
    return folder


def test_age_removes_what_is_old_and_never_the_latest_good_ones(runs_dir: Path) -> None:
    held = survey(runs_dir)
    assert {each.run.run_id: each.kept for each in held if each.kept} == {
        "agreed": "the newest that agrees with the oracle",
        "disagreed": "the newest with a trained model",
        "mistyped": "the newest run",
    }
    assert names(plan_pruning(held, older_than_days=30).going) == ["agreed-long-ago", "trained"]
    assert names(plan_pruning(held, older_than_days=0).going) == ["agreed-long-ago", "trained", "only-data"]


def test_size_removes_the_oldest_until_the_rest_fits_and_says_where_it_cannot(runs_dir: Path) -> None:
    held = survey(runs_dir)
    assert on_disk(held) == pytest.approx(12 * SIZE, rel=0.05)
    assert names(plan_pruning(held, total_bytes=20 * SIZE).going) == []
    plan = plan_pruning(held, total_bytes=10 * SIZE)
    assert names(plan.going) == ["agreed-long-ago"] and plan.note is None and plan.left <= 10 * SIZE
    plan = plan_pruning(held, total_bytes=SIZE)
    assert names(plan.going) == ["agreed-long-ago", "trained", "only-data"]
    assert plan.note is not None and "never removed" in plan.note
    with pytest.raises(TraceForgeError, match="--older-than"):
        plan_pruning(held)


def test_pruning_removes_whole_runs_and_what_an_interrupted_one_left(runs_dir: Path) -> None:
    (runs_dir / ".going-older" / "sft").mkdir(parents=True)
    (runs_dir / ".going-older" / "config.json").write_text("{}")
    (runs_dir / "history").mkdir()
    before = {run.run_id for run in list_runs(runs_dir)}
    assert ".going-older" not in before
    held = survey(runs_dir)
    plan = plan_pruning(held, older_than_days=30)
    assert prune(runs_dir, plan) == ["agreed-long-ago", "trained"]
    assert {path.name for path in runs_dir.iterdir()} == (before - {"agreed-long-ago", "trained"}) | {"history"}
    assert on_disk(held) - on_disk(survey(runs_dir)) == plan.freed > 5 * SIZE


def test_a_run_at_work_stays_even_where_it_was_taken_up_after_the_plan(runs_dir: Path) -> None:
    with Run.open(runs_dir, "trained").lock():
        assert names(plan_pruning(survey(runs_dir), older_than_days=30).going) == ["agreed-long-ago"]
    plan = plan_pruning(survey(runs_dir), older_than_days=30)
    with Run.open(runs_dir, "trained").lock():
        assert prune(runs_dir, plan) == ["agreed-long-ago"]
    assert Run.open(runs_dir, "trained").result("sft") is not None


def test_shared_files_count_once_and_are_freed_with_the_last_run_that_has_them(tmp_path: Path) -> None:
    for index, run_id in enumerate(("a", "b", "c")):
        make(tmp_path, run_id, 10 - index, "ingest", shared=True)
    held = survey(tmp_path)
    assert held[0].bytes == pytest.approx(SIZE, rel=0.05)
    assert on_disk(held) == pytest.approx(SIZE, rel=0.1), "the three are links to one file"
    assert freed(held[:2]) < SIZE / 10, "the third still has it"
    assert freed(held) == on_disk(held)


def test_a_torn_run_harms_no_other(runs_dir: Path) -> None:
    (runs_dir / "agreed" / "compare" / "manifest.json").write_text('{"fig')
    held = {each.run.run_id: each for each in survey(runs_dir)}
    assert held["agreed"].verdict is None
    assert held["agreed-long-ago"].kept == "the newest that agrees with the oracle"


def test_runs_side_by_side_show_only_what_differs(runs_dir: Path) -> None:
    runs = [Run.open(runs_dir, name) for name in ("agreed", "disagreed")]
    table = differences(runs)
    assert table["config.sft.seed"] == {"agreed": 60, "disagreed": 40}
    assert table["compare.verdict"] == {"agreed": "pass", "disagreed": "fail"}
    assert table["sft.seconds"]["disagreed"] is None and table["oracle.seconds"]["agreed"] is None
    assert "config.name" not in table and not any(name.startswith("versions.") for name in table)
    assert next(iter(table)) == "config.sft.seed"
    assert set(differences([runs[0], runs[0]])) == set()
