"""The stages of a run, in order: what each works from, which part of the configuration it depends on, what does it.

    result = perform("sft", config, Run.open(Path("runs")))

Each stage's own function lives with its subject and is imported only when it runs, so that importing this module costs
nothing. A stage function takes `(config, inputs, out_dir)`: the whole RunConfig, the folders of the stages it needs by
name, and an empty folder; it returns the figures worth showing.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.paths import written
from traceforge_core.runs import Figures, Inputs, Run, StageResult, fingerprint_tree, run_stage
from traceforge_core.runs.disk import require_room, stage_bytes

log = logging.getLogger(__name__)

StageFunction = Callable[..., Figures]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: `function` as module:name, `needs` stages that must be there, `uses` stages taken if they are there,
    `sections` of the configuration that change its result."""

    name: str
    title: str
    function: str
    sections: tuple[str, ...]
    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    resumable: bool = False

    def load(self) -> StageFunction:
        module, _, name = self.function.partition(":")
        function: StageFunction = getattr(import_module(module), name)
        return function


# Beside the trainer's own section: what the comparison wants recorded, and on which pairs.
PREFERENCE_SECTIONS = (
    "model",
    "preference",
    "comparison.gradient_steps",
    "comparison.oracle_max_length",
    "comparison.oracle_steps",
)

# From the adapter of `sft`, where `preference.start_from` says so.
START_FROM_SFT = ("oracle", "branch_parallel", "shared_prefix", "noise_floor", "planted_faults")

# Stages that work in child processes, on GPUs where there are some.
IN_WORKERS = ("sft", *START_FROM_SFT, "evaluate")

# Not by how many processes, or on which machines: that changes nothing in what is read or written.
INGEST_SECTIONS = ("ingest.path", "ingest.outcomes")
DATASETS_SECTIONS = ("datasets.split", "datasets.sft", "datasets.preference")

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            "ingest", "Read trajectories", "traceforge_core.trajectories.ingest:ingest", INGEST_SECTIONS, resumable=True
        ),
        Stage("model", "Prepare the model", "traceforge_core.modeling.prepare:prepare_model", ("model",)),
        Stage(
            "datasets",
            "Build SFT and preference datasets",
            "traceforge_core.datasets.build:build_datasets",
            DATASETS_SECTIONS,
            needs=("ingest", "model"),
        ),
        Stage(
            "sft",
            "Supervised fine-tuning",
            "traceforge_core.training.stages:train_sft",
            ("model", "sft"),
            needs=("model", "datasets"),
            resumable=True,
        ),
        Stage(
            "oracle",
            "SimPO with TRL's CPOTrainer",
            "traceforge_core.training.stages:train_oracle",
            PREFERENCE_SECTIONS,
            needs=("model", "datasets"),
            uses=("sft",),
            resumable=True,
        ),
        Stage(
            "branch_parallel",
            "Branch-Parallel SimPO",
            "traceforge_core.training.stages:train_branch_parallel",
            PREFERENCE_SECTIONS,
            needs=("model", "datasets"),
            uses=("sft",),
            resumable=True,
        ),
        Stage(
            "shared_prefix",
            "Shared-prefix SimPO",
            "traceforge_core.training.stages:train_shared_prefix",
            PREFERENCE_SECTIONS,
            needs=("model", "datasets"),
            uses=("sft",),
            resumable=True,
        ),
        Stage(
            "noise_floor",
            "Measure the oracle's own noise",
            "traceforge_core.comparison.noise_floor:measure_noise_floor",
            (
                *PREFERENCE_SECTIONS,
                "comparison.noise_runs",
                "comparison.noise_steps",
                "comparison.exact",
                "comparison.loss_atol",
                "comparison.gradient_rtol",
                "comparison.adapter_rtol",
            ),
            needs=("model", "datasets", "oracle"),
            uses=("sft",),
        ),
        Stage(
            "planted_faults",
            "Plant known faults, which the comparison has to find",
            "traceforge_core.comparison.planted_faults:plant_faults",
            (
                "model",
                "preference",
                "comparison.loss_atol",
                "comparison.gradient_rtol",
                "comparison.adapter_rtol",
            ),
            needs=("model", "datasets"),
            uses=("sft",),
        ),
        Stage(
            "evaluate",
            "Evaluate on held-out data",
            "traceforge_core.evaluation.evaluate:evaluate",
            ("evaluation", "model", "preference.beta", "preference.simpo_gamma"),
            needs=("model", "datasets"),
            uses=("sft", "oracle", "branch_parallel", "shared_prefix"),
        ),
        Stage(
            "compare",
            "Compare with the oracle",
            "traceforge_core.comparison.compare:compare",
            ("comparison", "preference", "model"),
            needs=("oracle",),
            uses=("branch_parallel", "shared_prefix", "noise_floor", "planted_faults", "evaluate"),
        ),
    )
}


def pipeline(config: RunConfig) -> list[str]:
    """The stages of a full run, in order: one long-context strategy beside the oracle, as configured.

    What rounding does is not measured for the tiny model in float32, which is too shallow for it to matter. Faults are
    planted where somebody asks for it, as the nightly regression does.
    """
    from traceforge_core.training.fit import resolve_strategy

    other = {"branch_parallel": "shared_prefix", "shared_prefix": "branch_parallel"}
    left_out = {other[resolve_strategy(config)], "planted_faults"}
    if config.model.dtype == "float32" and config.model.name == "tiny":
        left_out.add("noise_floor")
    return [name for name in STAGES if name not in left_out]


def perform(name: str, config: RunConfig, run: Run, *, refresh: bool = False, **how: Any) -> StageResult:
    """Do one stage of a run, or reuse its result. Raises TraceForgeError where a stage it needs or the run's folder is
    missing, or the disk has too little room for what it will write.

    `how` goes to the stage's function: ways to do its work that do not change the result (ingest's `run_jobs`).
    """
    stage = STAGES[name]
    if not run.path.is_dir():
        raise run.gone(f"before stage {name} began")
    found: dict[str, StageResult] = {}
    unused = {"sft"} if name in START_FROM_SFT and config.preference.start_from == "base" else set()
    for needed in (each for each in stage.needs + stage.uses if each not in unused):
        result = run.result(needed)
        if result is not None:
            found[needed] = result
        elif needed in needs_of(name, config):
            raise missing(name, needed, run)
        elif damage := run.damage(needed):
            log.warning("Stage %s leaves stage %s out, which is damaged: %s. Run it again.", name, needed, damage)
    function = stage.load()
    folders = {needed: result.path for needed, result in found.items()}

    def work(out_dir: Path) -> Figures:
        require_room(out_dir, stage_bytes(name, config, folders), f"stage {name}")
        return function(config, folders, out_dir, **how)

    return run_stage(
        run,
        name,
        {section: _dump(config, section) for section in stage.sections},
        Inputs(found, _outside(name, config)),
        work,
        refresh=refresh,
        resumable=stage.resumable,
    )


def needs_of(name: str, config: RunConfig) -> tuple[str, ...]:
    """What a stage cannot do without, in this configuration."""
    from_sft = name in START_FROM_SFT and config.preference.start_from == "sft"
    return STAGES[name].needs + (("sft",) if from_sft else ())


def missing(name: str, needed: str, run: Run | None) -> TraceForgeError:
    """The error of a stage whose needed stage is not there (in `run`; None: in a new one), or damaged."""
    where = f"run {run.run_id} does not have" if run else "a new run does not have"
    if run and (damage := run.damage(needed)):
        where = f"are damaged in run {run.run_id}: {damage}"
    return TraceForgeError(
        f"Stage {name} needs the outputs of stage {needed}, which {where}. Run {needed} first, or name a run that has "
        "it with --run."
    )


def _dump(config: RunConfig, section: str) -> Any:
    value: Any = config
    for part in section.split("."):
        value = getattr(value, part)
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _outside(name: str, config: RunConfig) -> dict[str, str]:
    """Fingerprints of what a stage reads that no stage made."""
    if name == "ingest":
        from traceforge_core.trajectories.ingest import corpus_folder

        paths = [corpus_folder(config.ingest.path), *map(Path, config.ingest.outcomes)]
    elif name == "model" and written(config.model.name).is_dir():
        paths = [written(config.model.name)]
    elif name == "datasets":
        preference = config.datasets.preference
        named = (("given", preference.given), ("sampled", preference.sampled.adapter))
        paths = [Path(path) for miner, path in named if miner in preference.miners and path]
    else:
        paths = []
    if not paths:
        return {}
    prints = [fingerprint_tree(written(path)) for path in paths]
    return {"files": hashlib.sha256(json.dumps(prints).encode()).hexdigest()}
