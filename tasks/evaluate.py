"""Task: measure every trained adapter on held-out data. Call it directly: a submitted task cannot be interrupted."""

from __future__ import annotations

from prefect.assets import materialize
from prefect.cache_policies import NO_CACHE
from prefect.states import State

from tasks.assets import declared
from tasks.performing import perform_stage
from traceforge_core.config import RunConfig
from traceforge_core.runs import Run, StageResult


@materialize(
    declared("evaluate"),
    name="Evaluate on held-out data",
    task_run_name="evaluate",
    tags=["evaluation", "gpu"],
    cache_policy=NO_CACHE,  # runs.py decides what can be used again, from contents
)
def evaluate(config: RunConfig, run: Run, refresh: bool = False) -> State[StageResult]:
    """Compare the base model and every adapter of the run on cases that none of them saw."""
    return perform_stage("evaluate", config, run, refresh)
