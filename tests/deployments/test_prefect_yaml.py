"""What deployments/prefect.yaml says, checked without a server."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import yaml

from deployments.crashes import SILENCE
from deployments.setup import POOL
from flows.pipeline import traceforge
from traceforge_core.config import RunConfig, load_config
from traceforge_core.stages import STAGES

FILE = Path(__file__).parents[2] / "deployments" / "prefect.yaml"


@pytest.fixture
def deployments() -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in yaml.safe_load(FILE.read_text(encoding="utf-8"))["deployments"]}


def test_there_is_one_for_the_whole_one_a_stage_and_one_for_the_night(deployments: dict[str, dict[str, Any]]) -> None:
    per_stage = {name.replace("_", "-") for name in STAGES}
    assert set(deployments) == {"full-pipeline", "nightly-regression"} | per_stage
    for name in STAGES:
        parameters = deployments[name.replace("_", "-")]["parameters"]
        assert parameters == {"stages": [name], "run": "latest"}


def test_every_deployment_is_the_flow_by_its_module_path_on_our_pool(deployments: dict[str, dict[str, Any]]) -> None:
    for deployment in deployments.values():
        module, _, name = deployment["entrypoint"].rpartition(".")
        assert getattr(import_module(module), name) is traceforge
        assert deployment["work_pool"]["name"] == POOL
        env = deployment["work_pool"]["job_variables"]["env"]
        beats = SILENCE.total_seconds() / int(env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
        assert beats >= 5, "a healthy run that misses a few heartbeats must not be marked as crashed"
    assert "pull" not in yaml.safe_load(FILE.read_text(encoding="utf-8"))


def test_parameters_are_accepted_by_the_flow(deployments: dict[str, dict[str, Any]]) -> None:
    for deployment in deployments.values():
        traceforge.validate_parameters(deployment["parameters"])


def test_the_form_shows_the_values_of_the_default_preset(deployments: dict[str, dict[str, Any]]) -> None:
    for name in ("full-pipeline", "nightly-regression"):
        config = RunConfig.model_validate(deployments[name]["parameters"]["config"])
        assert config == load_config(), "copy what changed in presets/tiny-cpu.yaml into deployments/prefect.yaml"


def test_the_night_does_everything_from_nothing_at_a_time_that_every_day_has_once(
    deployments: dict[str, dict[str, Any]],
) -> None:
    night = deployments["nightly-regression"]
    # The noise floor is what bfloat16 is judged by; this configuration is float32, which has fixed limits.
    assert night["parameters"]["stages"] == [name for name in STAGES if name != "noise_floor"]
    assert night["parameters"]["refresh"] is True and night["parameters"]["run"] == "new"
    [schedule] = night["schedules"]
    assert schedule["cron"] == "30 4 * * *" and schedule["slug"] == "nightly" and schedule["active"] is True
    assert ZoneInfo(schedule["timezone"])


def test_nights_do_not_overlap_and_are_remembered(deployments: dict[str, dict[str, Any]]) -> None:
    night = deployments["nightly-regression"]
    assert night["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    assert night["parameters"]["history"] == "nightly"
