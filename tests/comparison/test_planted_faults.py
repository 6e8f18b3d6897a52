"""The stage that plants every known fault in the strategies' own workers: all are found, and one that is missed fails
the comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from traceforge_core.comparison.detection import CLEAN, Detection
from traceforge_core.comparison.faults.registry import faults_of
from traceforge_core.comparison.planted_faults import CUT_TO, _telling_pairs, figures_of, plant_faults, read_planted
from traceforge_core.config import RunConfig


def said(fault: str, outcome: str, points_at: str | None = None) -> Detection:
    return Detection(fault, outcome, points_at, 1, (), 2.0, f"{points_at}, first at step 1")


@pytest.mark.slow
@pytest.mark.timeout(600)  # forty-two trainings, on a machine that may have much else to do
def test_every_fault_is_caught_in_both_strategies_and_the_report_points_at_it(
    short: RunConfig, inputs: dict[str, Path], tmp_path: Path
) -> None:
    figures = plant_faults(short, inputs, tmp_path)
    everything = [fault for kind in ("branch_parallel", "shared_prefix") for fault in faults_of(kind)]
    assert figures == {
        "verdict": "pass",
        "planted": len(everything),
        "caught": len(everything),
        "missed": [],
        "pointed_elsewhere": [],
        "false_alarms": [],
    }
    assert read_planted(tmp_path) == figures
    detections = json.loads((tmp_path / "planted_faults.json").read_text())["detections"]
    assert detections["branch_parallel: mean_of_gradients"]["points_at"] == "gradient norm"
    assert detections["branch_parallel: one_rank_steps"]["outcome"] == "stopped"
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"planted_faults.json", "report.md"}, "what was trained for it is gone"
    table = (tmp_path / "report.md").read_text()
    assert "| `mean_of_gradients` |" in table and "| gradient norm, step 1 | - |" in table
    assert "the workers refused to go on" in table and "missed" not in table


def test_a_missed_fault_or_a_false_alarm_fails_and_is_named() -> None:
    found = {
        "branch_parallel: clean": said(CLEAN, "pass"),
        "branch_parallel: mean_of_gradients": said("mean_of_gradients", "fail", "gradient norm"),
        "branch_parallel: adam_beta2": said("adam_beta2", "fail", "score"),
        "branch_parallel: one_rank_steps": said("one_rank_steps", "stopped"),
    }
    good = figures_of(found)
    assert (good["verdict"], good["planted"], good["caught"]) == ("pass", 3, 3)
    assert good["pointed_elsewhere"] == ["branch_parallel: adam_beta2"]

    missed = figures_of(found | {"shared_prefix: eos_dropped": said("eos_dropped", "pass")})
    assert (missed["verdict"], missed["missed"], missed["caught"]) == ("fail", ["shared_prefix: eos_dropped"], 3)
    alarmed = figures_of(found | {"shared_prefix: clean": said(CLEAN, "fail", "loss")})
    assert alarmed["verdict"] == "fail"
    assert alarmed["false_alarms"] == ["shared_prefix: loss, step 1"]


def test_pairs_with_an_observation_within_the_cut_come_first_and_without_any_that_fault_is_left_out(
    tmp_path: Path,
) -> None:
    import pyarrow as pa

    datasets = tmp_path / "datasets"
    (datasets / "preference").mkdir(parents=True)
    far = [1] * (CUT_TO // 2) + [0, 1]  # behind the cut
    masks = [[1, 1], far, [1, 1], [1, 1], [1, 1], [1, 1], [1, 0, 1]]
    rows = [{"pair_id": str(n), "chosen_mask": mask, "rejected_mask": [1]} for n, mask in enumerate(masks)]
    pq.write_table(pa.Table.from_pylist(rows), datasets / "preference" / "train.parquet")
    folder, observed = _telling_pairs(datasets, tmp_path / "some")
    taken = pq.read_table(folder / "preference" / "train.parquet").column("pair_id").to_pylist()
    assert observed and taken == ["6", "0", "1", "2", "3", "4"]

    pq.write_table(pa.Table.from_pylist(rows[:6]), datasets / "preference" / "train.parquet")
    assert _telling_pairs(datasets, tmp_path / "none")[1] is False
