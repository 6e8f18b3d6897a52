"""The float32 comparison beside a bfloat16 run: it finds a wrong optimizer whatever the run's own rates are."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_switched_off_nothing_is_trained(short_bfloat16: RunConfig, tmp_path: Path) -> None:
    off = lay_over(short_bfloat16, assignments=["comparison.exact=off"])
    assert compare_exactly(off, {}, tmp_path) == {}


def test_with_every_preset_weights_move_from_the_first_step_on() -> None:
    for name in preset_names():
        told = settings(load_config(name))
        assert told["preference.learning_rate"] >= 1e-3 and told["preference.warmup_steps"] == 0
