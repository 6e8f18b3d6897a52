"""What stages make, as Prefect assets with their lineage: corpus, model, datasets, adapters, evaluation, report.

    @materialize(declared("sft"), name=...)                 # on the stage's task
    with_lineage(sft, "sft", run)(config, run, refresh)     # in the flow, which knows the run

The key of an asset is `traceforge://<run>/<stage>` (Prefect allows no spaces and no % in a key, and folders have them);
its URL is the folder. It depends on the stages that this one works from. A stage that was reused makes nothing new,
so it sends no event.
"""

from __future__ import annotations

from typing import TypeVar

from prefect.assets import Asset, AssetProperties
from prefect.tasks import MaterializingTask

from traceforge_core.runs import Run, StageResult
from traceforge_core.stages import STAGES

R = TypeVar("R")


def declared(stage: str) -> str:
    """The key with which a stage's task is declared; in a run that run's own takes its place."""
    return f"traceforge://run/{stage}"


def asset_of(run: Run, stage: str) -> Asset:
    """What a stage makes in this run."""
    properties = AssetProperties(
        name=f"{stage} of {run.run_id}", url=run.stage_dir(stage).as_uri(), description=STAGES[stage].title
    )
    return Asset(key=f"traceforge://{run.run_id}/{stage}", properties=properties)


def with_lineage(task: MaterializingTask[..., R], stage: str, run: Run) -> MaterializingTask[..., R]:
    """The stage's task, making this run's asset out of those that are there of the stages it works from."""
    made = STAGES[stage]
    there = [asset_of(run, name) for name in made.needs + made.uses if run.result(name) is not None]
    return task.with_options(assets=[asset_of(run, stage)], asset_deps=list(there))


def describe(run: Run, result: StageResult) -> None:
    """Inside the task: the figures of what was made, and the key by which the same would be found again."""
    asset_of(run, result.stage).add_metadata({"figures": result.figures, "key": result.key, "seconds": result.seconds})
