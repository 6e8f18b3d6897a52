"""The flow on a real Prefect API, with stages that take no time."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.exceptions import CancelledRun, ParameterTypeError
from prefect.states import Running

from flows import pipeline
from flows.leftover import mark_crashed
from flows.pipeline import STAGE_TASKS, ParityFailed, StageName, traceforge
from flows.session import last_session
from traceforge_core.comparison.history import read
from traceforge_core.config import RunConfig, load_config
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import Run
from traceforge_core.stages import STAGES
from traceforge_core.stages import pipeline as full_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server", "fake_stages")]


def flow_run_of(run: Run) -> UUID:
    return UUID(last_session(run)["flow_run_id"])


def task_states(run: Run) -> dict[str, str]:
    """How the tasks of the run's last flow run ended. They reach the server as events, in the background: some time
    after the flow's own end, which the summary of stages tells."""
    begun = {stage for stage, noted in last_session(run)["stages"].items() if noted["status"] != "running"}
    wanted = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_of(run)]))
    deadline = time.monotonic() + 60
    with get_client(sync_client=True) as client:
        while True:
            states = {task.name: task.state for task in client.read_task_runs(flow_run_filter=wanted) if task.state}
            ended = begun <= set(states) and all(state.is_final() for state in states.values())
            if ended or time.monotonic() > deadline:
                return {name: state.name for name, state in states.items()}
            time.sleep(0.2)


def artifacts(run: Run) -> dict[str, str]:
    with get_client(sync_client=True) as client:
        wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_of(run)]))
        return {str(each.key): str(each.data) for each in client.read_artifacts(artifact_filter=wanted)}


def log_lines(run: Run) -> list[str]:
    """All lines of the run's last flow run. Prefect sends them in the background, a batch every two seconds, in order:
    the flow's own last one comes last."""
    wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run_of(run)]))
    deadline = time.monotonic() + 60
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            lines = client.read_logs(log_filter=wanted)
            if any(line.name == "prefect.flow_runs" and "Finished in state" in line.message for line in lines):
                return [line.message for line in lines]
            time.sleep(0.3)
    raise AssertionError("the log never arrived")


def asset_events(run: Run, event: str, count: int, seconds: float = 30) -> dict[str, Any]:
    """The asset events of the run's last flow run, by key, once there are so many (or the time is over)."""
    wanted = {"event": {"name": [event]}, "related": {"id": [f"prefect.flow-run.{flow_run_of(run)}"]}}
    deadline = time.monotonic() + seconds
    with get_client(sync_client=True) as client:
        while True:
            answer = client.request("POST", "/events/filter", json={"filter": wanted, "limit": 50})
            found = {each["resource"]["prefect.resource.id"]: each for each in answer.json()["events"]}
            if len(found) >= count or time.monotonic() > deadline:
                return found
            time.sleep(0.3)


@pytest.mark.parametrize(
    ("runs_dir", "said"),
    [
        ("", "at least 1 character"),
        ("a\0b", "match pattern"),
        ("~nobody-of-that-name/runs", "home of a user that is not known"),
        ("x" * 300, "File name too long"),
        ("/dev/null/runs", "Cannot make the run folder"),
    ],
)
def test_nonsense_that_comes_through_the_api_is_refused_with_its_reason(runs_dir: str, said: str) -> None:
    with pytest.raises((TraceForgeError, ParameterTypeError), match=said):
        traceforge(runs_dir=runs_dir)


def test_every_stage_has_a_task_and_a_name_to_choose() -> None:
    from typing import get_args

    literal, _ = get_args(StageName)
    assert list(get_args(literal)) == list(STAGES) == list(STAGE_TASKS)


def test_a_full_run_completes_shows_its_reports_and_is_reused_the_second_time(tmp_path: Path) -> None:
    summary = traceforge(run="new", runs_dir=str(tmp_path))
    run = Run.open(tmp_path)
    assert summary["run_id"] == run.run_id
    performed = set(full_run(RunConfig()))
    assert set(STAGES) - performed == {"shared_prefix", "noise_floor", "planted_faults"}, (
        "not asked for, not for float32"
    )
    assert {stage["stage"] for stage in summary["stages"] if stage["status"] == "completed"} == performed
    assert (summary["sft_samples"], summary["pairs_by_miner"]) == (7, {"outcome": 3, "recovery": 1})
    assert summary["parity"]["verdict"] == "pass"
    states = task_states(run)
    assert states.pop("monitor") == "Completed"
    assert set(states.values()) == {"Completed"} and len(states) == len(performed)

    shown = artifacts(run)
    assert set(shown) >= {"ingest-report", "datasets-report", "branch-parallel-report", "compare-report"}
    assert "| by outcome: resolved | 2 |" in shown["ingest-report"]
    assert f"# Run {run.run_id}" in shown["run-summary"] and "Parity with the oracle: PASS" in shown["run-summary"]
    assert "| sft | completed |" in shown["run-summary"] and str(run.path) in shown["run-summary"]
    assert "# The report" in shown["compare-report"] and "data:image/png;base64," in shown["compare-report"]
    made = asset_events(run, "prefect.asset.materialization.succeeded", len(performed))
    assert {key.rpartition("/")[2] for key in made} == performed
    adapter = made[f"traceforge://{run.run_id}/oracle"]
    assert adapter["payload"]["figures"]["steps"] == 3
    assert adapter["resource"]["prefect.asset.url"] == run.stage_dir("oracle").as_uri()
    made_from = {each["prefect.resource.id"] for each in adapter["related"] if each["prefect.resource.role"] == "asset"}
    assert made_from == {f"traceforge://{run.run_id}/{stage}" for stage in ("model", "datasets", "sft")}
    lines = log_lines(run)
    assert "a line from sft" in lines, "log lines of the library reach Prefect"
    assert any(line.startswith("sft: done in") for line in lines)

    again = traceforge(run=run.run_id, runs_dir=str(tmp_path), stages=[])  # what a form gives where none is chosen
    assert [stage["reused"] for stage in again["stages"] if stage["status"] == "completed"] == [True] * len(performed)
    states = task_states(run)
    states.pop("monitor")
    assert set(states.values()) == {"Cached"}
    assert "| sft | reused |" in artifacts(run)["run-summary"]
    assert not asset_events(run, "prefect.asset.materialization.succeeded", 1, seconds=2), "nothing new was made"


def test_one_stage_works_on_the_outputs_of_a_named_run_with_its_configuration(tmp_path: Path) -> None:
    traceforge(run="new", runs_dir=str(tmp_path), stages=["ingest", "model"], config=RunConfig(sft={"max_steps": 99}))
    run = Run.open(tmp_path)
    summary = traceforge(run="latest", runs_dir=str(tmp_path), stages=["datasets"])
    assert summary["run_id"] == run.run_id
    assert (run.stage_dir("datasets") / "output.txt").read_text() == "datasets from ingest, model\n"
    kept = RunConfig.model_validate_json((run.path / "config.json").read_text())
    assert kept.sft.max_steps == 99, "the run's own configuration was kept"
    assert kept.sft.batch_size == load_config().sft.batch_size, "the rest came from the default preset"
    assert set(task_states(run)) == {"datasets"}


def test_a_stage_without_its_inputs_says_what_to_run_first(tmp_path: Path) -> None:
    traceforge(run="new", runs_dir=str(tmp_path), stages=["ingest"])
    with pytest.raises(TraceForgeError, match="needs the outputs of stage model"):
        traceforge(run="latest", runs_dir=str(tmp_path), stages=["datasets"])


def test_a_path_that_is_not_there_fails_the_run_before_its_first_stage(tmp_path: Path) -> None:
    with pytest.raises(TraceForgeError, match=r"There is no model at nowhere \(model\.name\)"):
        traceforge(run="new", runs_dir=str(tmp_path), config=RunConfig(model={"name": "./nowhere"}))
    assert Run.open(tmp_path).result("ingest") is None


def test_a_model_that_the_strategy_cannot_compute_stops_the_run_before_its_first_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MODEL", "window")
    with pytest.raises(TraceForgeError, match=r"sliding window only \(64 tokens\). Use strategy branch_parallel"):
        traceforge(runs_dir=str(tmp_path), config=RunConfig(preference={"strategy": "shared_prefix"}))
    run = Run.open(tmp_path)
    assert run.result("datasets") is not None and run.result("sft") is None


def test_refresh_does_the_work_again(tmp_path: Path) -> None:
    traceforge(run="new", runs_dir=str(tmp_path), stages=["ingest"])
    run = Run.open(tmp_path)
    first = (run.stage_dir("ingest") / "output.txt").stat().st_ino
    summary = traceforge(run="latest", runs_dir=str(tmp_path), stages=["ingest"], refresh=True)
    assert summary["stages"][0]["reused"] is False
    assert (run.stage_dir("ingest") / "output.txt").stat().st_ino != first


def test_a_failed_verdict_fails_the_flow_after_its_report_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_COMPARE", "disagree")
    with pytest.raises(ParityFailed, match="does not agree with the oracle"):
        traceforge(run="new", runs_dir=str(tmp_path))
    run = Run.open(tmp_path)
    assert "# The report" in artifacts(run)["compare-report"]
    assert task_states(run)["compare"] == "Completed"
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(flow_run_of(run)).state_name == "Failed"


def test_a_history_that_cannot_be_written_hides_neither_verdict_nor_failure_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "history" / "nights.sqlite").mkdir(parents=True)  # somebody's folder lies where the file belongs
    stages = ["ingest", "model", "datasets", "sft", "oracle", "branch_parallel", "compare"]
    night: dict[str, Any] = {"runs_dir": str(tmp_path), "stages": stages, "refresh": True}
    with pytest.raises(TraceForgeError, match=r"did what it was to do, and could not be added.*Let this user write"):
        traceforge(history="nights", **night)
    monkeypatch.setenv("FAKE_COMPARE", "disagree")
    with pytest.raises(ParityFailed, match=r"(?s)does not agree.*could not be added to the history.*Let this user"):
        traceforge(history="nights", **night)
    monkeypatch.setenv("FAKE_ORACLE", "fail")
    with pytest.raises(TraceForgeError, match="The fake stage oracle was asked to fail"):
        traceforge(history="nights", **night)
    assert "could not be added to the history" in caplog.text


def test_a_night_that_cannot_even_begin_is_in_the_history(tmp_path: Path) -> None:
    with pytest.raises(TraceForgeError, match="There is no"):
        traceforge(RunConfig.model_validate({"ingest": {"path": "/none"}}), runs_dir=str(tmp_path), history="nights")
    [entry] = read(tmp_path / "history" / "nights.sqlite")
    assert entry.verdict == "error" and "/none" in entry.reason
    assert "error" in (tmp_path / "history" / "nights" / "trend.md").read_text()


def test_a_failed_training_stops_the_monitor_and_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SFT", "fail")
    before = threading.active_count()
    with pytest.raises(TraceForgeError, match="asked to fail"):
        traceforge(run="new", runs_dir=str(tmp_path))
    run = Run.open(tmp_path)
    states = task_states(run)
    assert states["sft"] == "Failed" and states["monitor"] == "Completed" and "oracle" not in states
    assert last_session(run)["stages"]["sft"]["status"] == "failed"
    assert (run.path / "monitoring" / "host_monitor.csv").read_text().startswith("ts,elapsed_s,pid,")
    assert threading.active_count() <= before + 2, "no sampler thread is left"
    assert run.result("sft") is None


def test_a_stop_file_ends_the_flow_as_cancelled_before_the_next_stage_and_the_next_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MODEL", "stop")
    with pytest.raises(CancelledRun, match=r"stopped before stage datasets, because .*STOP is there"):
        traceforge(run="new", runs_dir=str(tmp_path), stages=["ingest", "model", "datasets"], history="nights")
    run = Run.open(tmp_path)
    assert run.result("model") is not None and run.result("datasets") is None
    assert not (tmp_path / "history").exists(), "it says nothing about anything"
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(flow_run_of(run)).state_name == "Cancelled"
    summary = traceforge(run="latest", runs_dir=str(tmp_path), stages=["ingest", "model", "datasets"])
    assert [stage["status"] for stage in summary["stages"][:3]] == ["completed"] * 3 and not run.stop_file.exists()


def test_a_flow_run_whose_process_is_gone_is_marked_as_crashed_by_the_next_on_that_run(tmp_path: Path) -> None:
    traceforge(run="new", runs_dir=str(tmp_path), stages=["ingest"])
    run = Run.open(tmp_path)
    gone = flow_run_of(run)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(gone, Running(), force=True)  # as it stands there after a machine went down
        traceforge(run="latest", runs_dir=str(tmp_path), stages=["ingest"])
        assert client.read_flow_run(gone).state_name == "Crashed"
        assert client.read_flow_run(flow_run_of(run)).state_name == "Completed"
    assert not mark_crashed(str(gone)) and not mark_crashed("no number")
    assert not mark_crashed("00000000-0000-4000-8000-000000000000"), "another server's"


def test_a_run_is_worked_on_by_one_process_at_a_time(tmp_path: Path) -> None:
    traceforge(run="new", runs_dir=str(tmp_path), stages=["ingest"])
    with Run.open(tmp_path).lock(), pytest.raises(TraceForgeError, match="being worked on"):
        traceforge(run="latest", runs_dir=str(tmp_path), stages=["ingest"])


def test_training_takes_slots_for_its_cards_and_other_stages_take_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import contextlib

    held: list[int] = []

    @contextlib.contextmanager
    def note(count: int) -> Any:
        held.append(count)
        yield

    monkeypatch.setattr(pipeline, "gpus_held", note)
    for asking in ("flows.gpus", "traceforge_core.training.stages", "traceforge_core.training.seats"):
        monkeypatch.setattr(f"{asking}.visible_gpus", lambda: ["0", "1", "2"])
    traceforge(run="new", runs_dir=str(tmp_path), config=RunConfig(model={"device": "cuda"}))
    # ingest, model, datasets, sft, oracle, branch_parallel, evaluate, compare
    assert held == [0, 0, 0, 1, 1, 2, 1, 0]
