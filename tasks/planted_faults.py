"""Task: plant every known fault and see that the comparison finds it. Call it directly: a submitted task cannot be
interrupted."""

from __future__ import annotations

from prefect.assets import materialize
from prefect.cache_policies import NO_CACHE
from prefect.states import State

from tasks.assets import declared
from tasks.performing import perform_stage
from traceforge_core.config import RunConfig
from traceforge_core.runs import Run, StageResult


@materialize(
    declared("planted_faults"),
    name="Plant known faults",
    task_run_name="planted_faults",
    tags=["comparison", "gpu"],
    cache_policy=NO_CACHE,  # runs.py decides what can be used again, from contents
)
def planted_faults(config: RunConfig, run: Run, refresh: bool = False) -> State[StageResult]:
    """Train each strategy with every fault it can have, and compare."""
    return perform_stage("planted_faults", config, run, refresh)
