"""What a run has trained, for whatever works on it afterwards: evaluation, prediction, export.

trained = open_trained(Run.open(Path("runs")))
trained.adapters["branch_parallel"]
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from traceforge_core.config import RunConfig, validate_config
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import Run, StageResult
from traceforge_core.training.job import TRAINING

log = logging.getLogger(__name__)

BEST_FIRST = ("branch_parallel", "shared_prefix", "oracle", "sft")


@dataclass(frozen=True, slots=True)
class Trained:
    """A run's configuration, the folders of its model and datasets stages, and its adapters in the order of training.

    `stages` are all finished stages by name; `left_out` says of each damaged training stage what is wrong with it.
    """

    run: Run
    config: RunConfig
    model_dir: Path
    datasets: Path
    adapters: dict[str, Path]
    stages: dict[str, StageResult]
    left_out: dict[str, str]

    def adapter(self, stage: str | None = None) -> tuple[str, Path]:
        """The adapter of that stage; without a name, of the last kind of training that the run has.

        Raises TraceForgeError naming those that are there.
        """
        if stage is None and self.adapters:
            stage = next(name for name in BEST_FIRST if name in self.adapters)
        if stage is None or stage not in self.adapters:
            there = ", ".join(self.adapters) or "none"
            if damage := self.left_out.get(stage or ""):
                there += f"; that of {stage} is damaged: {damage}"
            raise TraceForgeError(
                f"Run {self.run.run_id} has no adapter{f' of stage {stage}' if stage else ''} (those there: {there}). "
                "Run a training stage first, or name one of them."
            )
        return stage, self.adapters[stage]


def open_trained(run: Run) -> Trained:
    """Warns of a training stage that is damaged, so that its adapter is left out.

    Raises TraceForgeError where the run's model or datasets stage is not finished.
    """
    try:
        config = validate_config(json.loads((run.path / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise TraceForgeError(f"Cannot read the configuration of run {run.run_id}: {error}.") from None
    found = {name: run.result(name) for name in ("model", "datasets", *TRAINING, "evaluate", "compare")}
    stages = {name: result for name, result in found.items() if result is not None}
    for needed in ("model", "datasets"):
        if needed not in stages:
            raise TraceForgeError(f"Run {run.run_id} has no finished stage {needed}. Finish it with: {run.command()}")
    adapters = {name: stages[name].path / "adapter" for name in TRAINING if name in stages}
    left_out = {name: damage for name in TRAINING if (damage := run.damage(name))}
    for name, damage in left_out.items():
        log.warning(
            "Stage %s of run %s is left out, it is damaged: %s. Train it again with: %s",
            name, run.run_id, damage, run.command(name),
        )  # fmt: skip
    return Trained(run, config, stages["model"].path, stages["datasets"].path, adapters, stages, left_out)
