"""Task: judge the strategies against the oracle. A failed verdict is a result here; the flow fails on it."""

from __future__ import annotations

from prefect.assets import materialize
from prefect.cache_policies import NO_CACHE
from prefect.states import State

from tasks.assets import declared
from tasks.performing import perform_stage
from traceforge_core.config import RunConfig
from traceforge_core.runs import Run, StageResult


@materialize(
    declared("compare"),
    name="Compare with the oracle",
    task_run_name="compare",
    tags=["comparison", "cpu"],
    cache_policy=NO_CACHE,  # runs.py decides what can be used again, from contents
)
def compare(config: RunConfig, run: Run, refresh: bool = False) -> State[StageResult]:
    """Compare losses, gradients and adapters, and write the report."""
    return perform_stage("compare", config, run, refresh)
