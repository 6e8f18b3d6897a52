"""The float32 comparison beside a bfloat16 run: it finds a wrong optimizer whatever the run's own rates are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from traceforge_core.comparison import exact
from traceforge_core.comparison.exact import compare_exactly, settings
from traceforge_core.config import RunConfig, lay_over, load_config, preset_names


@pytest.mark.slow
def test_a_wrong_optimizer_is_found_though_the_run_itself_hardly_moves_its_weights(
    short_bfloat16: RunConfig, inputs: dict[str, Path], tmp_path: Path
) -> None:
    """At a rate of 5e-6 after a warm-up, as SimPO needs it on a large model."""
    slow = lay_over(short_bfloat16, assignments=["preference.learning_rate=0.000005", "preference.warmup_steps=5"])
    planted = {"right": ("branch_parallel", None), "wrong": ("branch_parallel", "adam_beta2")}
    told = compare_exactly(slow, inputs, tmp_path, planted)
    assert told["right"]["outcome"] == "pass"
    assert told["wrong"]["outcome"] == "fail" and told["wrong"]["first"]["quantity"] == "adapter"
    assert not (tmp_path / "exact").exists()  # what was trained for it is gone


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_of_a_large_model_the_first_layers_are_compared(
    packed: bool, short_bfloat16: RunConfig, inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint in 4 bits is unpacked for it: rounding them is part of the model, and hides nothing in float32."""
    model = Path(shutil.copytree(inputs["model"], tmp_path / "model"))
    if packed:
        pytest.importorskip("bitsandbytes")
        pack(model / "weights")
    else:
        monkeypatch.setattr(exact, "WHOLE_BYTES", 0)
    monkeypatch.setattr(exact, "LAYERS", 1)
    planted = {"right": ("branch_parallel", None), "wrong": ("branch_parallel", "mean_of_gradients")}
    told = compare_exactly(short_bfloat16, {**inputs, "model": model}, tmp_path, planted)
    assert told["right"]["outcome"] == "pass"
    assert told["wrong"]["outcome"] == "fail" and told["wrong"]["first"]["quantity"] == "gradient norm"


def pack(weights: Path) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    AutoModelForCausalLM.from_pretrained(weights, quantization_config=nf4).save_pretrained(weights.with_name("nf4"))
    shutil.rmtree(weights)
    weights.with_name("nf4").rename(weights)


def test_weights_that_cannot_be_unpacked_are_said_to_be_so(
    short_bfloat16: RunConfig, inputs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Path(shutil.copytree(inputs["model"], tmp_path / "model"))
    about = model / "weights" / "config.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"quantization_config": {"quant_method": "unheard"}}))
    with caplog.at_level("INFO"):
        assert compare_exactly(short_bfloat16, {**inputs, "model": model}, tmp_path) == {}
    assert "No comparison in float32: Cannot load the model" in caplog.text
    assert not (tmp_path / "exact").exists()


def test_switched_off_nothing_is_trained(short_bfloat16: RunConfig, tmp_path: Path) -> None:
    off = lay_over(short_bfloat16, assignments=["comparison.exact=off"])
    assert compare_exactly(off, {}, tmp_path) == {}


def test_with_every_preset_weights_move_from_the_first_step_on() -> None:
    for name in preset_names():
        told = settings(load_config(name))
        assert told["preference.learning_rate"] >= 1e-3 and told["preference.warmup_steps"] == 0
