"""Task: SimPO, one worker a branch. Call it directly: a submitted task cannot be interrupted."""

from __future__ import annotations

from prefect.assets import materialize
from prefect.cache_policies import NO_CACHE
from prefect.states import State

from tasks.assets import declared
from tasks.performing import perform_stage
from traceforge_core.config import RunConfig
from traceforge_core.runs import Run, StageResult


@materialize(
    declared("branch_parallel"),
    name="Branch-Parallel",
    task_run_name="branch_parallel",
    tags=["training", "gpu"],
    cache_policy=NO_CACHE,  # runs.py decides what can be used again, from contents
)
def branch_parallel(config: RunConfig, run: Run, refresh: bool = False) -> State[StageResult]:
    """Train with the chosen and the rejected branch on two workers."""
    return perform_stage("branch_parallel", config, run, refresh)
