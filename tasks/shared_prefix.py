"""Task: SimPO, both branches in one sequence. Call it directly: a submitted task cannot be interrupted."""

from __future__ import annotations

from prefect.assets import materialize
from prefect.cache_policies import NO_CACHE
from prefect.states import State

from tasks.assets import declared
from tasks.performing import perform_stage
from traceforge_core.config import RunConfig
from traceforge_core.runs import Run, StageResult


@materialize(
    declared("shared_prefix"),
    name="Shared prefix",
    task_run_name="shared_prefix",
    tags=["training", "gpu"],
    cache_policy=NO_CACHE,  # runs.py decides what can be used again, from contents
)
def shared_prefix(config: RunConfig, run: Run, refresh: bool = False) -> State[StageResult]:
    """Train with the prompt computed once for both branches."""
    return perform_stage("shared_prefix", config, run, refresh)
