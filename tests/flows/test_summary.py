"""The summary of a run, as record and as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flows.session import Session, begin
from flows.summary import render, summarise, why_not
from traceforge_core.runs import Inputs, Run, StageResult, run_stage
from traceforge_core.stages import STAGES


def make(
    run: Run, stage: str, figures: dict[str, Any], inputs: Mapping[str, StageResult] = {}, seed: int = 0
) -> StageResult:
    return run_stage(run, stage, {"seed": seed}, Inputs(inputs), lambda folder: figures)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return begin(tmp_path, "new")[0]


def status(run: Run, stage: str) -> str:
    return next(each["status"] for each in summarise(run)["stages"] if each["stage"] == stage)


def test_an_empty_run_has_every_stage_as_not_run(run: Run) -> None:
    summary = summarise(run)
    assert [(each["stage"], each["status"]) for each in summary["stages"]] == [(name, "not_run") for name in STAGES]
    assert summary["sft_samples"] is summary["pairs_by_miner"] is summary["parity"] is None


def test_figures_of_the_datasets_and_the_verdict_are_lifted_out(run: Run) -> None:
    make(run, "datasets", {"sft_samples": 12, "pairs_by_miner": {"outcome": 3}})
    make(run, "compare", {"verdict": "pass", "branch_parallel": {"verdict": "pass", "max_loss_difference": 3e-8}})
    summary = summarise(run)
    assert (summary["sft_samples"], summary["pairs_by_miner"]) == (12, {"outcome": 3})
    assert summary["parity"] == {
        "verdict": "pass",
        "status": "completed",
        "branch_parallel": {"verdict": "pass", "max_loss_difference": 3e-8},
    }
    text = render(summary)
    assert "SFT samples: 12. Preference pairs by miner: outcome 3." in text
    assert "Parity with the oracle: PASS" in text and "max loss difference 3e-08" in text
    assert str(run.path) in text and "files: datasets/" in text
    assert f"{run.path}/compare/report.html" in text


@pytest.mark.parametrize("width", [60, 118])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_left_out(run: Run, width: int) -> None:
    dropped = {"too long": 55, "over max_samples": 3, "recovery: refers to what the prompt does not show": 27}
    make(run, "datasets", {"sft_samples": 12, "pairs_by_miner": {"outcome": 3, "recovery": 20}, "dropped": dropped})
    make(run, "compare", {"verdict": "pass", "branch_parallel": {"verdict": "pass", "max_loss_difference": 3e-8}})
    whole, narrow = (render(summarise(run), each) for each in (1000, width))
    paths = [line for line in narrow.splitlines() if str(run.path) in line]
    assert all(len(line) <= width for line in narrow.splitlines() if line not in paths)
    assert narrow.split() == whole.split()


def test_thin_data_says_what_it_was_lost_to(run: Run) -> None:
    dropped = {"too long": 55, "over max_samples": 3, "rare": 1, "no words": 2}
    make(run, "datasets", {"sft_samples": 5, "pairs_by_miner": {}, "dropped": dropped, "pairs_held_out": 1})
    text = render(summarise(run))
    assert "Most was dropped as: too long 55, over max_samples 3, no words 2" in text
    assert "Only 1 held-out pair: too few" in text
    assert "None" not in text


def test_without_a_held_out_pair_no_figure_of_pairs_is_shown_and_that_is_said(run: Run) -> None:
    make(run, "datasets", {"sft_samples": 5, "pairs": 3, "pairs_by_miner": {"outcome": 3}, "pairs_held_out": 0})
    make(run, "evaluate", {"pairs": 0, "accuracy": {"base": None, "sft": None}, "action_loss": {"base": 3.5}})
    text = render(summarise(run))
    assert "No held-out pair: nothing says how" in text
    assert "action loss (base 3.5)" in text and "accuracy" not in text


def test_a_stage_is_outdated_when_one_of_its_inputs_was_made_anew(run: Run) -> None:
    ingest = make(run, "ingest", {"found": 1})
    make(run, "datasets", {"sft_samples": 1}, {"ingest": ingest})
    assert status(run, "datasets") == "completed"
    make(run, "ingest", {"found": 2}, seed=1)
    assert status(run, "datasets") == "outdated" and status(run, "ingest") == "completed"


def test_a_failure_is_shown_with_its_reason(run: Run) -> None:
    def fail(folder: Path) -> dict[str, Any]:
        raise ValueError("no space for doubt")

    with pytest.raises(ValueError):
        run_stage(run, "sft", {}, Inputs(), fail)
    assert status(run, "sft") == "failed"
    assert "no space for doubt" in render(summarise(run))


def test_a_failed_second_attempt_is_shown_although_the_first_result_is_still_there(run: Run) -> None:
    make(run, "sft", {"steps": 3})
    Session(run, ["sft"]).note("sft", "failed", message="out of memory")
    [stage] = [each for each in summarise(run)["stages"] if each["stage"] == "sft"]
    assert (stage["status"], stage["message"], stage["figures"]) == ("failed", "out of memory", {"steps": 3})


def test_running_is_told_from_interrupted_by_whether_a_process_holds_the_run(run: Run) -> None:
    Session(run, ["sft"]).note("sft", "running")
    assert status(run, "sft") == "interrupted"
    with run.lock():
        assert status(run, "sft") == "running"


def test_reused_is_what_the_last_call_found(run: Run) -> None:
    make(run, "ingest", {"found": 1})
    Session(run, ["ingest"]).note("ingest", "completed", reused=True)
    summary = summarise(run)
    assert summary["stages"][0]["reused"] is True
    assert render(summary).splitlines()[2].split()[:2] == ["ingest", "reused"]


def test_what_is_no_pass_is_said_in_a_sentence() -> None:
    wrong = {"verdict": "fail", "first_wrong": "gradient norm at step 1"}
    right, open_ = {"verdict": "pass", "first_wrong": None}, {"verdict": "undecided", "first_wrong": None}
    told = why_not({"branch_parallel": wrong, "shared_prefix": right})
    assert told == "branch_parallel does not agree with the oracle (gradient norm at step 1)"
    assert why_not({"shared_prefix": open_}) == "whether shared_prefix agrees with the oracle is undecided"
    missed = {"missed": ["branch_parallel: adam_beta2"], "false_alarms": []}
    told = why_not({"branch_parallel": right, "planted_faults": missed})
    assert told == "the comparison no longer finds known faults (branch_parallel: adam_beta2)"
    alarms = {"missed": [], "false_alarms": ["branch_parallel: gradient norm, step 1", "shared_prefix: loss, step 2"]}
    told = why_not({"branch_parallel": wrong, "shared_prefix": right, "planted_faults": alarms})
    assert told.endswith(
        "(gradient norm at step 1); the comparison calls runs wrong in which no fault was planted "
        "(shared_prefix: loss, step 2)"
    )
