"""Which outcome file speaks about which trajectory, and which trajectories get no label."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trajectories.make import FLAT, chat_row, mini_v2, report
from traceforge_core.errors import TraceForgeError
from traceforge_core.trajectories.outcome_files import Claim
from traceforge_core.trajectories.outcomes import Outcomes


def outcomes_of(result: Any) -> dict[tuple[str, str], str | None]:
    return {(t.case, t.run): t.outcome for t in result.trajectories}


def test_a_run_report_speaks_about_its_own_run_only(write, run_ingest):
    for run, resolved in (("one", ["a__b-1"]), ("two", [])):
        write(f"{run}/a__b-1/a__b-1.traj.json", mini_v2(note=run))
        write(f"{run}/{run}.eval.json", report(resolved, [] if resolved else ["a__b-1"]))
    folder = write("three/a__b-1/a__b-1.traj.json", mini_v2(note="three"))
    assert outcomes_of(run_ingest(folder)) == {
        ("a__b-1", "one"): "resolved",
        ("a__b-1", "two"): "unresolved",
        ("a__b-1", "three"): None,
    }


def test_reports_at_the_top_are_matched_by_their_name(write, run_ingest):
    for run in ("one", "two"):
        write(f"out/{run}/a__b-1/a__b-1.traj.json", mini_v2(note=run))
    write("model__x.one.json", report(["a__b-1"]))
    folder = write("model__x.two.json", report([], ["a__b-1"]))
    assert set(outcomes_of(run_ingest(folder)).values()) == {"resolved", "unresolved"}
    assert outcomes_of(run_ingest(folder))["a__b-1", "out/one"] == "resolved"


def test_a_report_that_may_mean_several_runs_labels_none_and_is_reported(write, run_ingest):
    for run in ("one", "two"):
        write(f"{run}/a__b-1/a__b-1.traj.json", mini_v2(note=run))
    folder = write("report.json", report(["a__b-1"]))
    result = run_ingest(folder)
    assert set(outcomes_of(result).values()) == {None}
    assert result.figures["outcome_conflicts"] == 2
    assert "several runs" in result.figures["conflicts"][0]["conflict"]


def test_per_instance_reports_lie_beside_the_trajectory_or_in_the_harness_logs(write, run_ingest):
    write("one/a__b-1/a__b-1.traj.json", mini_v2(note="1"))
    write("one/a__b-1/report.json", FLAT)
    write("one/a__b-2/a__b-2.traj.json", mini_v2("a__b-2", note="2"))
    folder = write("logs/run_evaluation/one/model/a__b-2/report.json", {"a__b-2": {**FLAT, "resolved": False}})
    result = run_ingest(folder)
    assert outcomes_of(result) == {("a__b-1", "one"): "resolved", ("a__b-2", "one"): "unresolved"}
    assert all(t.outcome_source for t in result.trajectories)


def test_a_harbor_trial_is_labelled_by_its_verifier(write, run_ingest):
    atif = {
        "schema_version": "ATIF-v1.4",
        "agent": {"name": "a", "model_name": "m"},
        "steps": [
            {"step_id": 1, "source": "user", "message": "do"},
            {"step_id": 2, "source": "agent", "message": "done"},
        ],
    }
    write("job/fix-it__AbCdEf1/agent/trajectory.json", atif)
    write("job/fix-it__AbCdEf1/result.json", {"trial_name": "x", "verifier_result": {"rewards": {"reward": 1.0}}})
    atif["steps"][1]["message"] = "not done"
    write("job/fix-it__GhIjKl2/agent/trajectory.json", atif)
    folder = write("job/fix-it__GhIjKl2/verifier/reward.txt", "0\n")
    result = run_ingest(folder)
    assert {(t.case, t.outcome) for t in result.trajectories} == {("fix-it", "resolved"), ("fix-it", "unresolved")}
    assert len({t.run for t in result.trajectories}) == 2


def test_infrastructure_ends_and_runs_without_a_turn_have_no_label(write, run_ingest):
    write("one/a__b-1/a__b-1.traj.json", mini_v2(exit_status="InternalServerError"))
    write("one/a__b-2/a__b-2.traj.json", mini_v2("a__b-2", turns=0))
    folder = write("one/one.json", report([], ["a__b-1", "a__b-2"]))
    result = run_ingest(folder)
    assert [t.outcome for t in result.trajectories] == [None, None]
    assert result.figures["infrastructure_ends"] == 2


def test_a_row_field_against_a_report_is_a_conflict(write, run_ingest):
    write("rows.jsonl", json.dumps(chat_row("x", instance_id="a__b-1", resolved=True)))
    folder = write("report.json", report([], ["a__b-1"]))
    result = run_ingest(folder)
    assert result.trajectories[0].outcome is None
    assert (
        result.figures["outcome_conflicts"] == 1 and "row field resolved" in result.figures["conflicts"][0]["conflict"]
    )


def test_the_users_table_outranks_everything(write, run_ingest, tmp_path: Path):
    for run in ("one", "two"):
        write(f"{run}/a__b-1/a__b-1.traj.json", mini_v2(note=run))
    folder = write("one/one.json", report(["a__b-1"]))
    table = tmp_path / "labels.csv"
    table.write_text("case,run,resolved\na__b-1,one,false\na__b-1,two,true\n")
    result = run_ingest(folder, outcomes=[str(table)])
    assert outcomes_of(result) == {("a__b-1", "one"): "unresolved", ("a__b-1", "two"): "resolved"}
    lines = tmp_path / "labels.jsonl"
    lines.write_text('{"case": "a__b-1", "resolved": 1}\n')
    assert set(outcomes_of(run_ingest(folder, outcomes=[str(lines)])).values()) == {"resolved"}


def test_a_report_that_contradicts_itself_is_a_conflict(write, run_ingest):
    odd = {**FLAT, "patch_successfully_applied": False}
    write("run/a__b-1/report.json", {"a__b-1": odd})
    write("run/a__b-2/report.json", odd)
    write("run/a__b-2/a__b-2.traj.json", mini_v2("a__b-2"))
    result = run_ingest(write("run/a__b-1/a__b-1.traj.json", mini_v2("a__b-1")))
    assert [t.outcome for t in result.trajectories] == [None, None]
    assert result.figures["outcome_conflicts"] == 2
    assert all("patch_successfully_applied" in entry["conflict"] for entry in result.figures["conflicts"])


def test_an_outcome_entry_that_is_not_there_or_holds_nothing_is_an_error(write, run_ingest, tmp_path: Path):
    folder = write("a.traj.json", mini_v2())
    with pytest.raises(TraceForgeError, match=r"ingest\.outcomes"):
        run_ingest(folder, outcomes=[str(tmp_path / "nowhere.json")])
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(TraceForgeError, match="no outcomes that TraceForge knows"):
        run_ingest(folder, outcomes=[str(tmp_path / "empty.json")])


def test_outcome_files_outside_the_corpus_apply_by_case(write, run_ingest, tmp_path: Path):
    folder = write("a__b-1/a__b-1.traj.json", mini_v2())
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "x.json").write_text(json.dumps(report(["a__b-1"])))
    assert run_ingest(folder, outcomes=[str(tmp_path / "reports")]).trajectories[0].outcome == "resolved"


def test_the_harness_logs_of_one_run_say_nothing_about_another(write, run_ingest):
    for run in ("one", "two", "three"):
        write(f"trajs/{run}/a__b-1/a__b-1.traj.json", mini_v2(note=run))
    write("logs/run_evaluation/one/model/a__b-1/report.json", {"a__b-1": FLAT})
    folder = write("logs/run_evaluation/two/model/a__b-1/report.json", {"a__b-1": {**FLAT, "resolved": False}})
    assert outcomes_of(run_ingest(folder)) == {
        ("a__b-1", "trajs/one"): "resolved",
        ("a__b-1", "trajs/two"): "unresolved",
        ("a__b-1", "trajs/three"): None,
    }


def test_outcomes_decide_the_same_after_they_were_written_and_read():
    paths = ["run-1/a/a.traj.json", "run-2/a/a.traj.json", "odd-\udcff/b/b.traj.json"]
    before = Outcomes(paths)
    before.add("run-1/run-1.eval.json", [Claim("a", "resolved", "resolved_ids"), Claim("b", "unresolved", "x")])
    before.add("report.json", [Claim("a", "unresolved", "unresolved_ids")])
    before.add("odd-\udcff/b/verifier/result.json", [Claim(None, "resolved", "reward")])
    before.state("c", None, "resolved", "table.csv")
    before.state("c", "run-2", "unresolved", "table.csv")
    before.settle(paths)
    after = Outcomes.from_json(before.to_json())
    asked = [
        ("a", "run-1", paths[0]),
        ("a", "run-2", paths[1]),
        ("b", "b", paths[2]),
        ("c", "x", "c"),
        ("c", "run-2", "c"),
    ]
    decided = [before.decide(*each) for each in asked]
    assert [after.decide(*each) for each in asked] == decided
    assert {decision.label for decision in decided} >= {"resolved", "unresolved"}
    assert any(decision.conflict for decision in decided)
