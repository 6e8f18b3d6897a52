"""Task: settle the model and tokenizer, building or downloading what is needed."""

from __future__ import annotations

from prefect.assets import materialize
from prefect.cache_policies import NO_CACHE
from prefect.states import State

from tasks.assets import declared
from tasks.performing import perform_stage
from tasks.retries import may_pass
from traceforge_core.config import RunConfig
from traceforge_core.runs import Run, StageResult


@materialize(
    declared("model"),
    name="Prepare the model",
    task_run_name="model",
    tags=["model", "cpu"],
    cache_policy=NO_CACHE,  # runs.py decides what can be used again, from contents
    retries=2,
    retry_delay_seconds=[2, 10],
    retry_condition_fn=may_pass,
)
def model(config: RunConfig, run: Run, refresh: bool = False) -> State[StageResult]:
    """Build the tiny model, or find the named one. A download that broke off is tried again."""
    return perform_stage("model", config, run, refresh)
