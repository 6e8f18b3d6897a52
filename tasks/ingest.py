"""Task: read trajectory files."""

from __future__ import annotations

from prefect.assets import materialize
from prefect.cache_policies import NO_CACHE
from prefect.states import State

from tasks.assets import declared
from tasks.cluster import cluster_of
from tasks.performing import perform_stage
from tasks.retries import may_pass
from traceforge_core.config import RunConfig
from traceforge_core.runs import Run, StageResult


@materialize(
    declared("ingest"),
    name="Read trajectories",
    task_run_name="ingest",
    tags=["ingest", "cpu"],
    cache_policy=NO_CACHE,  # runs.py decides what can be used again, from contents
    retries=2,
    retry_delay_seconds=[2, 10],
    retry_condition_fn=may_pass,
)
def ingest(config: RunConfig, run: Run, refresh: bool = False) -> State[StageResult]:
    """Read every trajectory below config.ingest.path, on this machine or on the cluster that ingest.cluster names.

    A passing fault of a network disk is tried again.
    """
    run_jobs = cluster_of(config.ingest)
    return perform_stage("ingest", config, run, refresh, **({"run_jobs": run_jobs} if run_jobs else {}))
