"""The stage that runs the oracle against itself, and leaves behind what its differences are made of: noise.json.

    figures = measure_noise_floor(config, {"model": ..., "datasets": ..., "sft": ..., "oracle": ...}, out_dir)
    floor = read_floor(out_dir)

In float32 fixed tolerances are far above rounding and far below mistakes, but for single gradients of deep models: what
rounding does to those is measured then (rounding.py).
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from traceforge_core.comparison.deviations import Deviations, deviations
from traceforge_core.comparison.exact import compare_exactly
from traceforge_core.comparison.rounding import WAYS, run_rounding, write_rounding
from traceforge_core.comparison.series import run_series
from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import write_json
from traceforge_core.training.job import Job
from traceforge_core.training.stages import oracle_job

logger = logging.getLogger(__name__)
FEWEST = 3


@dataclass(frozen=True, slots=True)
class Floor:
    """runs: how the oracle differs from itself, a way each. again: how it does where nothing was changed."""

    runs: list[Deviations]
    again: Deviations | None = None


def measure_noise_floor(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> dict[str, Any]:
    """Train the oracle again for a few steps, once as it was and `comparison.noise_runs` times in other ways, and
    compare all strategies in float32 where that is affordable. Leaves noise.json and exact.json; in float32, where
    fixed tolerances decide, rounding.json, by which those for single gradients are widened."""
    if config.model.dtype == "float32":
        write_floor(Floor([]), out_dir)
        rounding = run_rounding(config, inputs, out_dir)
        write_rounding(rounding, out_dir)
        largest = max((value for step in rounding.values() for value in step.values()), default=0.0)
        return {"runs": len(WAYS), "steps": len(rounding), "gradient_rounding": largest}
    floor = run_floor(config, inputs, out_dir) if config.comparison.noise_runs else Floor([])
    write_floor(floor, out_dir)
    exact = compare_exactly(config, inputs, out_dir)
    write_json(out_dir / "exact.json", exact)
    figures: dict[str, Any] = {"runs": len(floor.runs), "exact": {name: one["outcome"] for name, one in exact.items()}}
    if floor.runs:
        figures |= {"steps": floor.runs[0].steps} | summary(floor)
    return figures


def summary(floor: Floor) -> dict[str, float]:
    """RMS over runs and steps of each difference; run_to_run_loss: where nothing was changed."""
    figures = {
        "loss_noise": _rms([run.loss for run in floor.runs]),
        "score_noise": _rms([run.score_chosen for run in floor.runs]),
        "gradient_norm_noise": _rms([run.norm for run in floor.runs]),
        "gradient_direction_noise": _rms([run.direction for run in floor.runs]),
        "adapter_noise": _rms([run.adapter for run in floor.runs]),
        "adapter_way_noise": _rms([run.moved for run in floor.runs]),
    }
    return figures | ({"run_to_run_loss": _rms([floor.again.loss])} if floor.again else {})


def run_floor(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> Floor:
    """The runs themselves, measured against the oracle in `inputs`. Their own outputs are removed once measured."""
    return run_floors({"": (config, inputs["oracle"])}, inputs, out_dir)[""]


def run_floors(
    oracles: Mapping[str, tuple[RunConfig, Path]], inputs: Mapping[str, Path], out_dir: Path
) -> dict[str, Floor]:
    """A floor for each of several oracles of one model, given by name as configuration and folder, in one worker."""
    from traceforge_core.comparison.variants import AGAIN, usable
    from traceforge_core.training.pairs import PairDataset

    jobs: dict[tuple[str, str], Job] = {}
    for name, (config, _) in oracles.items():
        untracked = config.preference.model_copy(update={"report_to": []})
        job = oracle_job(config.model_copy(update={"preference": untracked}), inputs, out_dir)
        base = replace(job, held_out=None)
        longest = PairDataset(base.data, base.cut_to).longest()
        for way in (AGAIN, *usable(config.comparison.noise_runs, longest, base.device)):
            jobs[name, way] = replace(base, out_dir=out_dir / "runs" / f"{len(jobs):02d}")
    last_step = max(config.comparison.noise_steps for config, _ in oracles.values())
    labels = {f"{name}: {way}" if name else way: (name, way) for name, way in jobs}
    stopped = run_series(
        {label: jobs[key] for label, key in labels.items()},
        out_dir / "runs",
        variants={label: way for label, (_, way) in labels.items()},
        last_step=last_step,
    )
    for label, message in stopped.items():
        if message is not None:
            raise TraceForgeError(f"The oracle computed in another way ({label}) would not go on: {message}")
    measured = {
        (name, way): deviations(oracles[name][1], job.out_dir, last_step, way) for (name, way), job in jobs.items()
    }
    shutil.rmtree(out_dir / "logs", ignore_errors=True)
    shutil.move(out_dir / "runs" / "logs", out_dir / "logs")
    shutil.rmtree(out_dir / "runs")
    return {name: _floor_of({way: run for (whose, way), run in measured.items() if whose == name}) for name in oracles}


def _floor_of(measured: dict[str, Deviations]) -> Floor:
    from traceforge_core.comparison.variants import AGAIN

    again = measured.pop(AGAIN)
    runs = [run for run in measured.values() if _differs(run)]
    for name in [run.name for run in measured.values() if not _differs(run)]:
        logger.info("The oracle computed in another way (%s) gave the same bits: no noise to be learnt from it.", name)
    if len(runs) < FEWEST:
        logger.warning(
            "Only %d ways of computing the oracle differ from it at all: too few to learn its noise.", len(runs)
        )
        runs = []
    return Floor(runs, again)


def write_floor(floor: Floor, folder: Path) -> None:
    """Leave it for `read_floor`."""
    again = floor.again.as_dict() if floor.again else None
    write_json(folder / "noise.json", {"runs": [run.as_dict() for run in floor.runs], "again": again})


def read_floor(folder: Path) -> Floor:
    """What the stage left. Raises TraceForgeError where it is not there."""
    try:
        told = json.loads((folder / "noise.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceForgeError(f"{folder} has no noise.json ({error}). Run the stage noise_floor again.") from None
    again = told["again"]
    return Floor([Deviations(**run) for run in told["runs"]], Deviations(**again) if again else None)


def read_exact(folder: Path) -> dict[str, Any]:
    """What the comparison in float32 said of each strategy; {} where there was none."""
    try:
        content: dict[str, Any] = json.loads((folder / "exact.json").read_text(encoding="utf-8"))
        return content
    except OSError:
        return {}


def _differs(run: Deviations) -> bool:
    return any(run.loss) or any(run.norm)


def _rms(columns: list[list[float]]) -> float:
    return math.sqrt(fmean(value * value for column in columns for value in column))
