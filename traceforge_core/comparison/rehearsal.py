"""The comparison put to the test: every fault planted in a strategy, clean runs, and how small an error is still seen.

    found = rehearse(config, {"model": ..., "datasets": ..., "sft": ...}, folder, "branch_parallel")
    [one.fault for one in found.detections if not one.caught]

Trainings are those of the stages, in series (series.py), and judged by what users' comparisons are judged by.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from traceforge_core.comparison.compare import judge
from traceforge_core.comparison.detection import CLEAN, Detection, detection, detection_in
from traceforge_core.comparison.exact import compare_exactly
from traceforge_core.comparison.faults.registry import faults_of
from traceforge_core.comparison.noise_floor import Floor, read_floor, run_floor, run_floors, write_floor
from traceforge_core.comparison.parity import Rounding, measure
from traceforge_core.comparison.rounding import run_rounding
from traceforge_core.comparison.series import run_series
from traceforge_core.config import RunConfig
from traceforge_core.training.job import Job, Kind
from traceforge_core.training.stages import oracle_job, preference_job

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """detections: CLEAN first. floor: the oracle's noise where it was measured (bfloat16)."""

    strategy: Kind
    detections: list[Detection]
    floor: Floor


def rehearse(
    config: RunConfig,
    inputs: Mapping[str, Path],
    folder: Path,
    strategy: Kind,
    faults: Sequence[str] | None = None,
    share_gpu: bool = False,
) -> Rehearsal:
    """Train the oracle, measure its noise in bfloat16, and train the strategy clean and with each fault (all that it
    can have; names with an amount are allowed); in bfloat16 in float32 too, as the stage noise_floor does. An oracle
    and a noise floor that lie in `folder` already are used again."""
    oracle = _train_oracle_in(config, inputs, folder / "oracle")
    floor = Floor([])
    rounding: Rounding = {}
    if config.model.dtype != "float32":
        floor = _floor(config, {**inputs, "oracle": oracle}, folder / "noise")
    elif config.model.name != "tiny":  # as in a full run (stages.pipeline)
        rounding = run_rounding(config, {**inputs, "oracle": oracle}, folder / "noise" / strategy)
    names = [CLEAN, *(faults if faults is not None else [fault.name for fault in faults_of(strategy)])]
    planted = {name: None if name == CLEAN else name for name in names}
    exact: dict[str, Any] = {}
    if config.model.dtype != "float32":
        # Errors of falling size are for the noise to let through or not; in float32 they need no second run.
        wanted = {name: (strategy, fault) for name, fault in planted.items() if ":" not in name}
        exact = compare_exactly(config, inputs, folder / strategy, wanted)
    base = replace(
        preference_job(strategy, config, inputs, folder), held_out=None, cut_to=config.comparison.oracle_max_length
    )
    jobs = {
        name: replace(
            base,
            out_dir=folder / strategy / name.replace(":", "_"),
            planted_fault=fault,
            transport="gloo" if share_gpu else base.transport,
        )
        for name, fault in planted.items()
    }
    stopped = run_series(jobs, folder / strategy, share_gpu=share_gpu)
    found = []
    for name, job in jobs.items():
        if (message := stopped[name]) is not None:
            found.append(Detection(name, "stopped", None, None, (), float("inf"), message))
        else:
            verdict = judge(config, oracle, job.out_dir, measure(oracle, job.out_dir, rounding), floor)
            beside = detection_in(name, exact[name]) if name in exact else None
            found.append(replace(detection(name, verdict), exact=beside))
        told = found[-1].decisive
        logger.info("%s in %s: %s, %s", name, strategy, told.outcome, told.reason)
    return Rehearsal(strategy, found, floor)


def clean_runs(
    config: RunConfig, inputs: Mapping[str, Path], folder: Path, strategies: Sequence[Kind], seeds: Sequence[int]
) -> dict[Kind, list[Detection]]:
    """The clean strategies against the oracle with each seed (another order of the data): no alarm may be raised. In
    bfloat16 every seed's data gives its own noise floor, by which all strategies are judged."""
    configs = {
        str(seed): config.model_copy(update={"preference": config.preference.model_copy(update={"seed": seed})})
        for seed in seeds
    }
    oracles = {
        seed: replace(oracle_job(one, inputs, folder / "oracle" / seed), held_out=None) for seed, one in configs.items()
    }
    run_series(oracles, folder / "oracle")
    floors = dict.fromkeys(configs, Floor([]))
    if config.model.dtype != "float32":
        floors = run_floors(
            {seed: (configs[seed], oracles[seed].out_dir) for seed in configs}, inputs, folder / "noise"
        )
    roundings: dict[str, Rounding] = {}
    if config.model.dtype == "float32" and config.model.name != "tiny":
        for seed, one in configs.items():
            beside = {**inputs, "oracle": oracles[seed].out_dir}
            roundings[seed] = run_rounding(one, beside, folder / "noise" / seed)
    told: dict[Kind, list[Detection]] = {}
    for strategy in strategies:
        jobs = {
            seed: replace(
                preference_job(strategy, one, inputs, folder / strategy / seed),
                held_out=None,
                cut_to=config.comparison.oracle_max_length,
            )
            for seed, one in configs.items()
        }
        run_series(jobs, folder / strategy)
        told[strategy] = []
        for seed, job in jobs.items():
            parity = measure(oracles[seed].out_dir, job.out_dir, roundings.get(seed))
            verdict = judge(config, oracles[seed].out_dir, job.out_dir, parity, floors[seed])
            told[strategy].append(detection(CLEAN, verdict))
    return told


def _train_oracle_in(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> Path:
    """The oracle's run in that folder, trained unless it is there."""
    job: Job = replace(oracle_job(config, inputs, out_dir / "run"), held_out=None)
    if not (job.out_dir / "training.json").exists():
        run_series({"oracle": job}, out_dir)
    return job.out_dir


def _floor(config: RunConfig, inputs: Mapping[str, Path], folder: Path) -> Floor:
    if (folder / "noise.json").exists():
        return read_floor(folder)
    folder.mkdir(parents=True, exist_ok=True)
    floor = run_floor(config, inputs, folder)
    write_floor(floor, folder)
    return floor
