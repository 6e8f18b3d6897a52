"""Which run a call works on, and with which configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.session import Session, begin, last_session, ordered, saved_config
from traceforge_core.config import RunConfig, load_config
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import Run, list_runs
from traceforge_core.stages import STAGES, pipeline


def test_a_new_run_has_the_default_preset_with_the_given_fields_over_it(tmp_path: Path) -> None:
    run, config = begin(tmp_path, "new", RunConfig(sft={"max_steps": 4}))
    assert config == load_config(assignments=["sft.max_steps=4"])
    assert saved_config(run) == config


def test_a_run_that_is_gone_on_with_keeps_its_configuration(tmp_path: Path) -> None:
    first, _ = begin(tmp_path, "new", RunConfig(sft={"max_steps": 4}, model={"device": "cpu"}))
    begin(tmp_path, "new", RunConfig(sft={"max_steps": 9}))
    run, config = begin(tmp_path, first.run_id, RunConfig(preference={"beta": 3.0}))
    assert run == first
    assert (config.sft.max_steps, config.preference.beta) == (4, 3.0)
    latest, config = begin(tmp_path, "latest")
    assert latest == first and config.preference.beta == 3.0, "the one worked on last is the latest"


def test_a_run_that_cannot_be_begun_because_the_disk_is_full_leaves_nothing_behind(full_disk: Path) -> None:
    with pytest.raises(TraceForgeError, match=r"The disk is full: .*Free some space"):
        begin(full_disk, "new")
    assert [each.name for each in full_disk.iterdir()] == ["fill"]


def test_a_flow_run_that_is_retried_goes_on_with_the_run_it_made(tmp_path: Path) -> None:
    run, config = begin(tmp_path, "new", flow_run_id="flow-run-1")
    Session(run, ["ingest"], "flow-run-1")
    again, _ = begin(tmp_path, "new", config, flow_run_id="flow-run-1")
    other, _ = begin(tmp_path, "new", config, flow_run_id="flow-run-2")
    assert again == run and other != run
    assert len(list_runs(tmp_path)) == 2


def test_a_run_at_work_keeps_its_configuration(tmp_path: Path) -> None:
    run, config = begin(tmp_path, "new")
    with run.lock(), pytest.raises(TraceForgeError, match="being worked on"):
        begin(tmp_path, run.run_id, RunConfig(sft={"max_steps": 1}))
    assert saved_config(run) == config


def test_an_unknown_run_is_named_and_nothing_is_made(tmp_path: Path) -> None:
    begin(tmp_path, "new")
    with pytest.raises(TraceForgeError, match="There is no run 'yesterday'"):
        begin(tmp_path, "yesterday")
    assert len(list_runs(tmp_path)) == 1


def test_stages_come_in_the_order_of_the_pipeline_with_hyphens_or_underscores() -> None:
    config = load_config()
    assert ordered(["compare", "branch-parallel", "ingest", "ingest"], config) == [
        "ingest",
        "branch_parallel",
        "compare",
    ]
    assert ordered(None, config) == pipeline(config)
    with pytest.raises(TraceForgeError, match=r"No such stage: cook, stew\. Stages: ingest, model"):
        ordered(["stew", "cook", "ingest"], config)
    with pytest.raises(TraceForgeError, match="No stage is named"):
        ordered([], config)


def test_what_a_call_does_is_written_down_as_it_happens(tmp_path: Path) -> None:
    run, _ = begin(tmp_path, "new")
    assert last_session(run) == {}
    session = Session(run, ["ingest", "model"], "flow-run-1")
    session.note("ingest", "completed", reused=True)
    session.note("model", "failed", message="no such model")
    noted = last_session(run)
    assert noted["asked_for"] == ["ingest", "model"] and noted["flow_run_id"] == "flow-run-1"
    assert noted["stages"] == {
        "ingest": {"status": "completed", "reused": True},
        "model": {"status": "failed", "reused": False, "message": "no such model"},
    }


def test_a_configuration_from_another_release_says_what_is_wrong(tmp_path: Path) -> None:
    run, _ = begin(tmp_path, "new")
    tree = json.loads((run.path / "config.json").read_text())
    tree["sft"]["retired"] = 1
    (run.path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(TraceForgeError, match=r"sft\.retired: no such field"):
        begin(tmp_path, "latest")
    assert set(STAGES) and Run.open(tmp_path) == run
