"""Differences between two trained stages, in float32: what is measured, and what is over its limit."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from traceforge_core.comparison.compare import compare
from traceforge_core.comparison.noise_floor import Floor, write_floor
from traceforge_core.comparison.parity import Parity, StepDifference, measure
from traceforge_core.comparison.tolerances import judge_exactly
from traceforge_core.config import ComparisonConfig, RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.training.records import StepRecord, append_record, read_records

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WEIGHTS = {"a.lora_A.weight": torch.arange(6.0).reshape(2, 3) + 1, "a.lora_B.weight": torch.ones(3, 2)}
TRAINING = {
    "start": {"adapter": "1", "data order": "2", "tokenizer": "3", "base weights": "4"},
    "dtype": "float32",
    "quantization": "none",
    "device": "cpu",
    "device_name": "cpu",
    "backend": "transformers",
    "workers": 1,
    "transport": None,
}


def stage(folder: Path, *, loss: float = 1.0, score: float = -1.5, scale: float = 1.0, steps: int = 5, **training: Any):
    """A finished stage whose losses, scores, gradients and adapter are those numbers."""
    (folder / "gradients").mkdir(parents=True)
    (folder / "adapter").mkdir()
    for number in range(1, steps + 1):
        record = StepRecord(
            number,
            loss,
            score_chosen=score,
            score_rejected=score - 0.5,
            margin=1.0,
            accuracy=1.0,
            grad_norm=2.0,
            learning_rate=1e-3,
            seconds=0.1,
            tokens=10,
            peak_memory_mib=1.0,
        )
        append_record(folder / "metrics.jsonl", record)
        save_file({"a.lora_A.weight": torch.ones(2, 3) * scale}, folder / f"gradients/step-{number:05d}.safetensors")
    save_file({name: value * scale for name, value in WEIGHTS.items()}, folder / "adapter/adapter_model.safetensors")
    (folder / "training.json").write_text(json.dumps(TRAINING | training))
    return folder


@pytest.fixture
def oracle(tmp_path: Path) -> Path:
    return stage(tmp_path / "oracle")


def verdict(oracle: Path, candidate: Path) -> tuple[str, str]:
    found = judge_exactly(measure(oracle, candidate), ComparisonConfig())
    return found.outcome, "; ".join(found.reasons)


def test_equal_stages_pass_with_zero_differences(oracle: Path, tmp_path: Path) -> None:
    parity = measure(oracle, stage(tmp_path / "other"))
    assert (parity.max_loss, parity.max_score, parity.max_gradient, parity.adapter) == (0.0, 0.0, 0.0, 0.0)
    assert parity.gradient_steps == 5
    outcome, reasons = verdict(oracle, tmp_path / "other")
    assert outcome == "pass"
    assert "within the plain tolerances too, at every step (loss 1e-06, adapter 1e-05, gradient 1e-05)" in reasons


def test_equal_weights_that_are_saved_to_be_put_to_use_otherwise_are_no_equal_adapters(
    oracle: Path, tmp_path: Path
) -> None:
    other = stage(tmp_path / "other")
    right: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
    wrong: list[dict[str, Any]] = [{"lora_alpha": 8}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 1}}]
    harmless: list[dict[str, Any]] = [{}, {"use_rslora": None}, {"target_modules": "(q|v)_proj"}, {"lora_dropout": 0.1}]
    (oracle / "adapter" / "adapter_config.json").write_text(json.dumps(right))
    for change in (*wrong, *harmless):
        (other / "adapter" / "adapter_config.json").write_text(json.dumps(right | change))
        outcome, reasons = verdict(oracle, other)
        assert outcome == ("fail" if change in wrong else "pass"), change
        assert change in harmless or "saved adapter, first at step 6: in adapter_config.json " in reasons
        assert change != {"lora_alpha": 8} or "lora_alpha is 8, the oracle's 4. Weights, loaded with that" in reasons


def test_a_pass_that_needs_the_allowance_for_large_scores_says_so(tmp_path: Path) -> None:
    oracle = stage(tmp_path / "oracle", score=-6.0)
    outcome, reasons = verdict(oracle, stage(tmp_path / "other", score=-6.0, loss=1.0 + 3e-6))
    assert outcome == "pass"
    assert "beyond the plain: loss 3e-06 (over 1e-06)" in reasons


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"loss": 1.0 + 1e-5}, "loss, first at step 1: the loss differs by 1e-05"),
        ({"scale": 1.0 + 3e-5}, "gradients of 5 steps, largest relative L2 difference of a parameter: 3"),
        ({"loss": math.nan}, "NaN or inf"),
        ({"start": TRAINING["start"] | {"adapter": "9"}}, "adapter differ between the two before the first step"),
        (
            {"start": TRAINING["start"] | {"base weights": "9"}},
            "base weights differ between the two before the first step",
        ),
    ],
)
def test_what_is_over_its_limit_fails_and_is_named(
    change: dict[str, Any], named: str, oracle: Path, tmp_path: Path
) -> None:
    outcome, reasons = verdict(oracle, stage(tmp_path / "other", **change))
    assert outcome == "fail"
    assert named in reasons


def test_what_lora_b_differs_by_may_show_in_the_gradient_of_a_but_not_before_the_weights_differ() -> None:
    """A fresh B is a thousandth of A: its rounding is nothing beside the whole adapter, and all of A's gradient."""
    steps = [StepDifference(1, 0, 0, 0, 0, weights=0.0, weights_b=0.0, direction=4e-6, direction_parameter="b")]
    steps.append(replace(steps[0], step=2, weights=1e-7, weights_b=1e-5, direction=4e-5, direction_parameter="a"))
    assert judge_exactly(Parity(steps, 1e-6, "a", 1e-6), ComparisonConfig()).outcome == "pass"

    wrong = [replace(steps[0], direction=4e-5), steps[1]]
    verdict = judge_exactly(Parity(wrong, 1e-6, "a", 1e-6), ComparisonConfig())
    assert verdict.first is not None and (verdict.first.quantity, verdict.first.step) == ("gradient direction", 1)


def test_an_entry_of_rounding_that_moved_its_weight_the_other_way_is_no_wrong_optimizer(tmp_path: Path) -> None:
    folders = []
    for name, small in (("oracle", 1e-6), ("other", -1e-6)):
        folders.append(stage(tmp_path / name, steps=1))
        records = read_records(folders[-1] / "metrics.jsonl")
        (folders[-1] / "metrics.jsonl").unlink()
        append_record(folders[-1] / "metrics.jsonl", replace(records[0], weights_sketch=[10.0] * 32))
        save_file({"a.lora_A.weight": torch.tensor([1.0, small])}, folders[-1] / "gradients/step-00001.safetensors")
    [step] = measure(*folders).steps
    assert step.turned == pytest.approx(1e-3 * 2 / 10, rel=0.02)  # the rate, either way, beside weights of length 10

    after = StepDifference(2, 0, 0, 0, 0, weights=1.5e-4)
    explained = Parity([replace(step, weights=0.0), after], 1e-6, "a", 1e-6)
    assert judge_exactly(explained, ComparisonConfig()).outcome == "pass"
    verdict = judge_exactly(
        replace(explained, steps=[replace(step, weights=0.0, turned=0.0), after]), ComparisonConfig()
    )
    assert verdict.first is not None and (verdict.first.quantity, verdict.first.step) == ("adapter", 2)


def test_what_rounding_does_to_a_gradient_of_the_oracle_is_allowed_to_that_gradient_alone(tmp_path: Path) -> None:
    """A parameter that is a small remainder of large terms: its gradient has few digits, and the rest all of them."""
    folders = []
    for name, off in (("oracle", 0.0), ("other", 4e-5)):
        folders.append(stage(tmp_path / name, steps=1))
        gradients = {"big": torch.tensor([1.0, 1.0]), "small": torch.tensor([1e-3, 1e-3 * (1 + off)])}
        save_file(gradients, folders[-1] / "gradients/step-00001.safetensors")
    assert judge_exactly(measure(*folders), ComparisonConfig()).first.quantity == "gradient direction"  # type: ignore[union-attr]
    explained = measure(*folders, rounding={1: {"big": 1e-7, "small": 8e-6}})
    assert explained.steps[0].direction_parameter == "small" and explained.steps[0].explained == pytest.approx(2.4e-5)
    told = judge_exactly(explained, ComparisonConfig())
    assert told.outcome == "pass" and "within what float32 rounding explains" in told.reasons[-1]
    elsewhere = measure(*folders, rounding={1: {"big": 8e-6, "small": 1e-7}})
    assert judge_exactly(elsewhere, ComparisonConfig()).outcome == "fail"


def test_what_only_the_float32_comparison_found_decides_and_is_named(oracle: Path, tmp_path: Path) -> None:
    floor = tmp_path / "noise_floor"
    floor.mkdir()
    write_floor(Floor([]), floor)
    first = {"quantity": "adapter", "step": 3, "value": 1e-4, "limit": 1e-5, "detail": "it is 0.0001 off"}
    told = {"outcome": "fail", "reasons": ["adapter, first at step 3: it is off."], "first": first, "findings": [first]}
    (floor / "exact.json").write_text(json.dumps({"branch_parallel": told}))
    folders = {"oracle": oracle, "branch_parallel": stage(tmp_path / "bp"), "noise_floor": floor}
    out = tmp_path / "compare"
    out.mkdir()
    figures = compare(RunConfig.model_validate({"model": {"dtype": "bfloat16"}}), folders, out)
    assert figures["verdict"] == figures["branch_parallel"]["verdict"] == "fail"
    assert figures["branch_parallel"]["first_wrong"] == "adapter at step 3"
    short = (out / "report.md").read_text().split("![")[0]
    assert "branch_parallel: in float32, on short pairs: **fail**. Adapter, first at step 3: it is off." in short


def test_what_float32_found_is_named_before_what_the_noise_let_through(oracle: Path, tmp_path: Path) -> None:
    """A wrong forward moves the scores of random weights less than bfloat16 rounds, and their gradients a lot."""
    floor = tmp_path / "noise_floor"
    floor.mkdir()
    write_floor(Floor([]), floor)
    first = {"quantity": "score", "step": 1, "value": 0.03, "limit": 1e-5, "detail": "it is 0.03 off"}
    told = {"outcome": "fail", "reasons": ["score, first at step 1: it is off."], "first": first, "findings": [first]}
    (floor / "exact.json").write_text(json.dumps({"branch_parallel": told}))
    started = TRAINING["start"] | {"adapter": "9"}
    folders = {"oracle": oracle, "branch_parallel": stage(tmp_path / "bp", start=started), "noise_floor": floor}
    out = tmp_path / "compare"
    out.mkdir()
    figures = compare(RunConfig.model_validate({"model": {"dtype": "bfloat16"}}), folders, out)
    assert figures["branch_parallel"]["first_wrong"] == "score at step 1"
    short = (out / "report.md").read_text().split("![")[0]
    assert short.index("Score, first at step 1: it is off.") < short.index(
        "In the run's own precision: **fail**. Start,"
    )


def test_a_planted_fault_that_was_missed_fails_the_whole_and_is_told_first(oracle: Path, tmp_path: Path) -> None:
    planted = tmp_path / "planted_faults"
    planted.mkdir()
    told = {"verdict": "fail", "planted": 38, "caught": 37, "missed": ["branch_parallel: adam_beta2"]}
    told |= {"pointed_elsewhere": [], "false_alarms": []}
    (planted / "planted_faults.json").write_text(json.dumps({"figures": told, "detections": {}}))
    folders = {"oracle": oracle, "branch_parallel": stage(tmp_path / "bp"), "planted_faults": planted}
    out = tmp_path / "compare"
    out.mkdir()
    figures = compare(RunConfig(), folders, out)
    assert figures["verdict"] == "fail" and figures["branch_parallel"]["verdict"] == "pass"
    short = (out / "report.md").read_text().split("![")[0]
    assert "Known faults: **fail**. 37 of 38 were found when planted. Missed" in short
    assert "branch_parallel: adam_beta2" in short and json.loads((out / "report.json").read_text())["planted_faults"]
    assert figures["planted_faults"] == told


def test_another_backend_may_pack_its_base_weights_in_its_own_way(oracle: Path, tmp_path: Path) -> None:
    other = stage(tmp_path / "other", backend="unsloth", start=TRAINING["start"] | {"base weights": "9"})
    assert verdict(oracle, other)[0] == "pass"


def test_other_numbers_of_steps_cannot_be_compared(oracle: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceForgeError, match=r"took 4 steps and oracle 5"):
        measure(oracle, stage(tmp_path / "other", steps=4))


def test_adapters_of_other_shapes_cannot_be_compared(oracle: Path, tmp_path: Path) -> None:
    other = stage(tmp_path / "other")
    save_file({"a.lora_A.weight": torch.ones(2, 3)}, other / "adapter" / "adapter_model.safetensors")
    with pytest.raises(TraceForgeError, match=r"a.lora_B.weight is in only one of them"):
        measure(oracle, other)


def test_the_stage_writes_a_report_for_people_one_for_programs_and_a_plot(oracle: Path, tmp_path: Path) -> None:
    folders = {
        "oracle": oracle,
        "branch_parallel": stage(tmp_path / "bp", workers=2, transport="gloo"),
        "shared_prefix": stage(tmp_path / "sp", loss=1.5),
    }
    out = tmp_path / "compare"
    out.mkdir()
    figures = compare(RunConfig(), folders, out)
    assert figures["verdict"] == "fail"
    assert figures["branch_parallel"]["verdict"] == "pass"
    assert figures["shared_prefix"]["max_loss_difference"] == 0.5
    report = (out / "report.md").read_text()
    assert "Verdict: **fail**" in report and "branch_parallel: **pass**" in report
    assert json.loads((out / "report.json").read_text())["verdict"] == "fail"
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("trusted", [(True, True), (False, True), (False, False)])
def test_that_code_of_the_model_was_allowed_to_run_is_said_in_the_report_and_only_then(
    trusted: tuple[bool, bool], tmp_path: Path
) -> None:
    folders = {
        name: stage(tmp_path / name, trust_remote_code=one)
        for name, one in zip(("oracle", "branch_parallel"), trusted, strict=True)
    }
    (out := tmp_path / "compare").mkdir()
    compare(RunConfig(), folders, out)
    for name in ("report.md", "report.html"):
        assert ("model.trust_remote_code" in (out / name).read_text(encoding="utf-8")) is any(trusted), name


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_html_report_needs_no_file_beside_it_to_show_verdict_plots_and_tables(oracle: Path, tmp_path: Path) -> None:
    folders = {
        "oracle": oracle,
        "branch_parallel": stage(tmp_path / "bp"),
        "shared_prefix": stage(tmp_path / "sp", loss=2.0),
    }
    (tmp_path / "compare").mkdir()
    compare(RunConfig(), folders, tmp_path / "compare")
    (tmp_path / "alone").mkdir()
    copy = tmp_path / "alone" / "report.html"
    shown = "document.title = [...document.images].map(image => image.naturalWidth > 400)"
    text = (tmp_path / "compare" / "report.html").read_text(encoding="utf-8")
    copy.write_text(text.replace("</html>", f"<script>onload = () => {shown}</script></html>"), encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=3000", "--dump-dom", f"file://{copy}"]
    page = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout
    assert "<title>true,true,true</title>" in page
    assert page.index('Verdict: <b class="fail">fail</b>') < page.index("<img ") < page.index("<table>")
    assert '<a href="../branch_parallel/">' in page
    assert not re.search(r'(?:src|href)="https?:', page)


def test_without_a_strategy_there_is_nothing_to_compare(oracle: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceForgeError, match=r"neither branch_parallel nor shared_prefix"):
        compare(RunConfig(), {"oracle": oracle}, tmp_path)


def test_a_nan_among_differences_is_not_hidden_by_a_larger_number(oracle: Path, tmp_path: Path) -> None:
    parity = measure(oracle, stage(tmp_path / "other"))
    steps = [replace(parity.steps[0], loss=math.nan), replace(parity.steps[1], loss=5.0)]
    assert math.isnan(replace(parity, steps=steps).max_loss)
