"""Task: supervised fine-tuning. Call it directly: a submitted task cannot be interrupted."""

from __future__ import annotations

from prefect.assets import materialize
from prefect.cache_policies import NO_CACHE
from prefect.states import State

from tasks.assets import declared
from tasks.performing import perform_stage
from traceforge_core.config import RunConfig
from traceforge_core.runs import Run, StageResult


@materialize(
    declared("sft"),
    name="Supervised fine-tuning",
    task_run_name="sft",
    tags=["training", "gpu"],
    cache_policy=NO_CACHE,  # runs.py decides what can be used again, from contents
)
def sft(config: RunConfig, run: Run, refresh: bool = False) -> State[StageResult]:
    """Train the SFT adapter in a child process."""
    return perform_stage("sft", config, run, refresh)
