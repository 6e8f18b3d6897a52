"""The report's part on held-out data: strategies that agree with the oracle may all be worse than they began."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.comparison.test_parity import stage
from traceforge_core.comparison.compare import compare
from traceforge_core.config import RunConfig


def measured(margin: float) -> dict[str, Any]:
    pairs = {"accuracy": 0.625, "margin": margin, "score_chosen": -1.25, "score_rejected": -2.5}
    return {"pairs": pairs | {"length_correlation": 0.375}, "actions": {"loss": 3.125, "token_accuracy": 0.4375}}


def report_with(tmp_path: Path, models: dict[str, Any]) -> str:
    folders = {"oracle": stage(tmp_path / "oracle"), "branch_parallel": stage(tmp_path / "bp")}
    for name in ("evaluate", "compare"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "evaluate" / "evaluation.json").write_text(json.dumps({"models": models}))
    figures = compare(RunConfig(), folders | {"evaluate": tmp_path / "evaluate"}, tmp_path / "compare")
    assert figures["verdict"] == "pass"
    return (tmp_path / "compare" / "report.md").read_text()


def test_every_model_is_shown_with_pairs_and_actions_and_one_that_got_worse_is_named(tmp_path: Path) -> None:
    models = {"base": measured(0.0), "sft": measured(0.5), "oracle": measured(0.25), "branch_parallel": measured(0.75)}
    report = report_with(tmp_path, models)
    held_out = report.split("## On held-out data")[1].split("\n## ")[0]
    assert "| branch_parallel | 0.625 | 0.75 | -1.25 | -2.5 | 0.375 | 3.125 | 0.4375 |" in held_out
    assert [name for name in models if f"\n| {name} |" in held_out] == list(models)
    assert "oracle has a smaller margin on held-out pairs (0.25) than sft, from which it started (0.5)" in held_out
    assert "branch_parallel has a smaller margin" not in held_out


def test_equal_weights_that_score_held_out_pairs_otherwise_were_saved_with_another_configuration(
    tmp_path: Path,
) -> None:
    models = {"oracle": measured(0.25), "branch_parallel": measured(0.25)}
    assert "beside the weights" not in report_with(tmp_path / "same", models)
    models["branch_parallel"]["pairs"]["score_chosen"] = -1.2
    said = "branch_parallel has weights that agree with the oracle's and another score chosen on held-out pairs (-1.2, "
    assert said in report_with(tmp_path / "other", models)


def test_what_was_not_measured_is_a_dash(tmp_path: Path) -> None:
    report = report_with(tmp_path, {"base": {"pairs": None, "actions": {"loss": 3.125, "token_accuracy": 0.4375}}})
    assert "| base | - | - | - | - | - | 3.125 | 0.4375 |" in report


def test_a_comparison_on_cut_pairs_says_so_links_to_it_and_says_whose_held_out_figures_may_differ(
    tmp_path: Path,
) -> None:
    whole = report_with(tmp_path, {"base": measured(0.0), "oracle": measured(0.25)})
    close = "loss 0, gradients 0, final adapter 0 (relative)."
    assert "- branch_parallel: **pass**. Equal start, data, scored tokens and learning rates at every step. " in whole
    assert f"Largest differences in 5 steps: {close}" in whole
    assert "([steps](../branch_parallel/metrics.jsonl)" in whole
    assert "cut to" not in whole

    cut = tmp_path / "cut"
    stage(cut / "bp", loss=2.0)  # the whole training
    stage(cut / "bp" / "proof", cut_to=384)
    for name in ("evaluate", "compare"):
        (cut / name).mkdir()
    models = {"oracle": measured(0.25), "branch_parallel": measured(0.75)}
    (cut / "evaluate" / "evaluation.json").write_text(json.dumps({"models": models}))
    folders = {"oracle": stage(cut / "oracle", cut_to=384), "branch_parallel": cut / "bp", "evaluate": cut / "evaluate"}
    assert compare(RunConfig(), folders, cut / "compare")["verdict"] == "pass"
    report = (cut / "compare" / "report.md").read_text()
    assert f"Largest differences in 5 steps on pairs cut to 384 tokens: {close}" in report
    assert "([steps](../branch_parallel/proof/metrics.jsonl), [logs](../branch_parallel/proof/logs/))" in report
    assert "([steps](../oracle/metrics.jsonl)" in report
    assert "The oracle was trained on pairs cut to 384 tokens" in report.split("## On held-out data")[1]
