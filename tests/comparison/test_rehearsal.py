"""Clean runs raise no alarm, and in bfloat16 faults leave the oracle's noise. (All faults, in float32:
test_planted_faults.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from traceforge_core.comparison.detection import CLEAN
from traceforge_core.comparison.faults.registry import FAULTS, faults_of
from traceforge_core.comparison.rehearsal import clean_runs, rehearse
from traceforge_core.config import RunConfig
from traceforge_core.training.job import Kind

SEEDS = [*range(9), 19]  # with 19 an entry of a gradient is rounding and nothing else


def test_every_fault_of_the_list_is_there() -> None:
    both = {fault.name for fault in faults_of("branch_parallel")} | {fault.name for fault in faults_of("shared_prefix")}
    assert both == set(FAULTS)
    assert len(FAULTS) >= 20
    assert all(fault.what for fault in FAULTS.values())


@pytest.mark.slow
@pytest.mark.timeout(600)  # thirty trainings, on a machine that may have much else to do
def test_clean_runs_in_other_orders_of_the_data_raise_no_alarm(
    short: RunConfig, inputs: dict[str, Path], tmp_path: Path
) -> None:
    told = clean_runs(short, inputs, tmp_path, ["branch_parallel", "shared_prefix"], SEEDS)
    for found in told.values():
        assert len(found) == len(SEEDS)
        assert [one.reason for one in found if not one.right] == []


BF16_FAULTS: dict[Kind, list[str]] = {
    "branch_parallel": [
        "prompt_in_score",
        "branches_swapped",
        "lora_scaling_off",
        "gamma_divided_twice",
        "mean_of_gradients",
        "layer_gradient_lost",
        "schedule_off_by_one",
        "one_rank_steps_unwatched",
        "adam_beta2",
        "score_off:0.1",
        "score_off:1e-05",
        "gradients_scaled:0.1",
        "gradients_scaled:1e-05",
    ],
    "shared_prefix": [
        "eos_dropped",
        "label_shift_in_prefix",
        "rejected_sees_chosen",
        "positions_not_restarted",
        "rejected_predicted_by_chosen",
        "layer_gradient_lost",
        "adam_beta2",
        "score_off:1e-05",
    ],
}


@pytest.mark.slow
@pytest.mark.timeout(600)  # sixty trainings, on a machine that may have much else to do
@pytest.mark.parametrize("strategy", list(BF16_FAULTS))
def test_in_bfloat16_faults_leave_the_noise_of_the_oracle_or_are_found_in_float32_and_clean_runs_pass(
    strategy: Kind, short_bfloat16: RunConfig, inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "rehearsal-bfloat16"  # one oracle and one noise floor for both strategies
    rehearsal = rehearse(short_bfloat16, inputs, folder, strategy, BF16_FAULTS[strategy])
    found = {one.fault: one for one in rehearsal.detections}
    assert found[CLEAN].outcome == "pass", found[CLEAN].reason
    assert found[CLEAN].right
    wrongly = {name: (one.decisive.pointed_at, one.reason) for name, one in found.items() if name in FAULTS}
    assert {name: told for name, told in wrongly.items() if not found[name].right} == {}
    # Far below the noise nothing can be seen, and nothing must be said.
    assert found["score_off:1e-05"].outcome == "pass"
    exact = found["adam_beta2"].exact
    assert exact is not None and (exact.outcome, exact.pointed_at) == ("fail", "adapter")
    if strategy == "branch_parallel":
        assert found["score_off:0.1"].pointed_at == "score"
        assert found["gradients_scaled:0.1"].pointed_at == "gradient norm"
        assert found["gradients_scaled:1e-05"].outcome == "pass"

    assert len(rehearsal.floor.runs) >= 5
    assert rehearsal.floor.again is not None and not any(rehearsal.floor.again.loss)
    assert 1e-6 < max(map(abs, rehearsal.floor.runs[0].loss)) < 0.1
