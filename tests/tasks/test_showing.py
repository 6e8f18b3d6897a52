"""The progress artifact of a stage at work, on a real Prefect API."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from tasks import showing
from tasks.showing import progress_shown
from traceforge_core.runs.progress import progress

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


def artifact(key: str) -> Any:
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
        return found[0] if found else None


def test_it_moves_while_the_stage_works_and_belongs_to_its_task_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(showing, "POLL_SECONDS", 0.05)
    seen: list[tuple[float, str]] = []

    @task
    def stage() -> None:
        with (
            progress_shown("branch_parallel", tmp_path) as shown,
            progress(tmp_path, "working", "pairs", total=4) as told,
        ):
            for _ in range(4):
                told.add()
                told.write()
                deadline = time.monotonic() + 20
                while len(seen) < told._told["done"] and time.monotonic() < deadline:
                    there = artifact("branch-parallel-progress")
                    if there is not None and (there.data, there.description) not in seen:
                        seen.append((there.data, there.description))
            shown.done = "done in 1.5 s"

    @flow
    def one_stage() -> None:
        stage()

    one_stage()
    assert [data for data, _ in seen] == [25, 50, 75, 100]
    assert seen[0][1].startswith("working: 1 of 4 pairs")
    last = artifact("branch-parallel-progress")
    assert last.data == 100 and last.description == "done in 1.5 s"
    assert last.task_run_id is not None and last.type == "progress"


def test_a_stage_that_fails_stays_where_it_was_and_a_quick_one_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(showing, "POLL_SECONDS", 0.05)

    @flow
    def failing() -> None:
        with progress_shown("quick", tmp_path):
            pass
        with progress_shown("failing", tmp_path), progress(tmp_path, "working", "pairs", total=4) as told:
            told.add(3)
            told.write()
            while artifact("failing-progress") is None:
                time.sleep(0.05)
            raise ZeroDivisionError("a fault")

    with pytest.raises(ZeroDivisionError):
        failing()
    assert artifact("quick-progress") is None
    assert artifact("failing-progress").data == 75
