"""Task: run the oracle against itself, to learn what rounding alone does. Call it directly: a submitted task cannot be
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
    declared("noise_floor"),
    name="Noise floor of the oracle",
    task_run_name="noise_floor",
    tags=["comparison", "gpu"],
    cache_policy=NO_CACHE,  # runs.py decides what can be used again, from contents
)
def noise_floor(config: RunConfig, run: Run, refresh: bool = False) -> State[StageResult]:
    """Train the oracle in ways that must not matter, and measure by how much they do."""
    return perform_stage("noise_floor", config, run, refresh)
