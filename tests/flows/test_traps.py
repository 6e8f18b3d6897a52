"""Guards against what bites in Prefect that need no server to be checked (docs/faults.md has the whole list)."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Task
from prefect.cache_policies import NO_CACHE

from deployments import serve
from flows import gpus, pipeline
from traceforge_core.config import load_config, preset_names
from traceforge_core.runs import Inputs, installed_versions, stage_key
from traceforge_core.training import launch

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("flows", "tasks", "deployments") for path in sorted((ROOT / folder).glob("*.py"))]


def calls(name: str) -> list[str]:
    """Calls of something of that name in flows, tasks and deployments, each with its file."""
    return [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == name
    ]


def all_tasks() -> Iterator[tuple[str, Task[Any, Any]]]:
    for path in sorted((ROOT / "tasks").glob("*.py")):
        module = import_module(f"tasks.{path.stem}")
        yield from ((name, value) for name, value in vars(module).items() if isinstance(value, Task))


def test_only_monitor_and_shards_are_submitted_as_a_submitted_task_cannot_be_interrupted() -> None:
    submitted = sorted({call.split("(")[0] for call in calls("submit")})
    assert submitted == ["flows/pipeline.py: monitor.submit", "tasks/cluster.py: runner.submit"]


def test_no_stage_is_a_deployment_of_its_own_as_a_cancellation_does_not_reach_those() -> None:
    assert calls("run_deployment") == []


def test_nothing_depends_on_hooks_which_run_in_other_processes_or_not_at_all() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    assert re.findall(r"\b(on_cancellation|on_crashed|on_failure|on_completion)\b", text) == []


def test_tasks_keep_no_result_of_prefects_and_have_no_time_limit_that_threads_would_not_obey() -> None:
    found = dict(all_tasks())
    assert {"ingest", "sft", "oracle", "branch_parallel", "compare", "monitor"} <= set(found)
    for name, task in found.items():
        assert task.cache_policy is NO_CACHE or task.cache_policy == NO_CACHE, name
        assert task.timeout_seconds is None, name


def test_only_reading_is_tried_again_as_a_second_try_would_start_workers_while_a_run_is_cancelled() -> None:
    tried_again = {name for name, task in all_tasks() if task.retries}
    assert tried_again <= {"ingest", "model"} and "ingest" in tried_again
    assert all(task.retry_condition_fn is not None for name, task in all_tasks() if name in tried_again)
    assert not pipeline.traceforge.retries


def test_workers_stay_in_the_group_that_prefect_signals_and_have_pipes_of_their_own() -> None:
    source = inspect.getsource(launch)
    assert "start_new_session" not in source and "setsid" not in source and "process_group" not in source
    assert "stdout=subprocess.PIPE" in source and "stdin=subprocess.DEVNULL" in source


def test_a_limit_that_is_missing_is_an_error_and_a_lost_lease_ends_no_training() -> None:
    source = inspect.getsource(gpus.gpus_held)
    assert "strict=runtime.deployment.id is not None" in source
    assert "raise_on_lease_renewal_failure=False" in source and "timeout_seconds=" in source


def test_a_served_server_remembers_leases_and_no_client_starts_one_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = serve._environment(_free_port(), tmp_path)
    assert env["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"].endswith("lease_storage.filesystem")
    assert import_module(env["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"]).ConcurrencyLeaseStorage
    assert env["PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"] == "false"
    assert env["PREFECT_SERVER_API_HOST"] == "127.0.0.1" and env["PREFECT_API_URL"].startswith("http://127.0.0.1:")


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_deployments_hold_no_templates_which_fail_only_when_a_run_begins() -> None:
    text = (ROOT / "deployments" / "prefect.yaml").read_text(encoding="utf-8")
    assert "{{" not in text and "{$" not in text
    assert "build" not in yaml.safe_load(text) and "push" not in yaml.safe_load(text)


def test_parameters_are_small_as_they_are_stored_with_every_run() -> None:
    for preset in preset_names():
        assert len(json.dumps(load_config(preset).model_dump(mode="json"))) < 16_384


def test_documented_commands_do_not_watch_which_hangs_where_a_client_has_a_server_of_its_own() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        assert not any(re.search(r"--watch(?!-timeout)", block) for block in blocks), page


def test_other_code_and_other_libraries_are_other_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect's own key knows of a task's source only, not of what it calls."""
    before = stage_key("sft", {}, Inputs())
    monkeypatch.setattr("traceforge_core.runs.stage.source_hash", lambda: "other code")
    other_code = stage_key("sft", {}, Inputs())
    monkeypatch.undo()
    monkeypatch.setattr("traceforge_core.runs.stage.installed_versions", lambda: installed_versions() | {"torch": "0"})
    assert len({before, other_code, stage_key("sft", {}, Inputs())}) == 3
