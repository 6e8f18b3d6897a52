"""Task: build the SFT and the preference dataset."""

from __future__ import annotations

from prefect.assets import materialize
from prefect.cache_policies import NO_CACHE
from prefect.states import State

from tasks.assets import declared
from tasks.performing import perform_stage
from traceforge_core.config import RunConfig
from traceforge_core.runs import Run, StageResult


@materialize(
    declared("datasets"),
    name="Build datasets",
    task_run_name="datasets",
    tags=["datasets", "cpu"],
    cache_policy=NO_CACHE,  # runs.py decides what can be used again, from contents
)
def datasets(config: RunConfig, run: Run, refresh: bool = False) -> State[StageResult]:
    """Turn trajectories into SFT samples and preference pairs."""
    return perform_stage("datasets", config, run, refresh)
