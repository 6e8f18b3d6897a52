"""What rounding alone does to single gradients in float32, a parameter at a time: the oracle in other ways again.

    rounding = run_rounding(config, {"model": ..., "datasets": ..., "sft": ..., "oracle": ...}, folder)
    parity = measure(oracle, candidate, rounding)

A parameter whose gradient is a small remainder of large terms (the branches of a pair have most of their prompt in
common, and a matrix A is multiplied by a B that is hardly there yet) keeps fewer digits than the whole gradient does,
the more so the deeper the model: how many fewer, no fixed limit knows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from traceforge_core.comparison.parity import Rounding, turned_gradients
from traceforge_core.comparison.series import run_series
from traceforge_core.config import RunConfig
from traceforge_core.runs import write_json
from traceforge_core.training.records import read_gradients
from traceforge_core.training.stages import oracle_job

# Rows by themselves and shifted; branches the other way round under another attention. (variants.py)
WAYS = {
    "alone": "one row at a time, 3 tokens of padding before",
    "turned": "rejected first, eager attention, 5 tokens of padding before",
}
FILE = "rounding.json"


def run_rounding(config: RunConfig, inputs: Mapping[str, Path], folder: Path) -> Rounding:
    """Train the oracle in WAYS for the steps whose gradients it saved, `comparison.noise_steps` at most, and measure
    against the one in `inputs`. What they leave is removed."""
    untracked = config.preference.model_copy(update={"report_to": []})
    job = oracle_job(config.model_copy(update={"preference": untracked}), inputs, folder)
    runs = folder / "rounding"
    jobs = {name: replace(job, held_out=None, out_dir=runs / name) for name in WAYS}
    last_step = min(config.comparison.noise_steps, config.comparison.gradient_steps)
    if not last_step:
        return {}
    run_series(jobs, runs, variants=WAYS, last_step=last_step)
    rounding = rounding_of(inputs["oracle"], [one.out_dir for one in jobs.values()])
    shutil.rmtree(runs)
    return rounding


def rounding_of(oracle: Path, runs: Sequence[Path]) -> Rounding:
    """For every step whose gradients all of them saved, and every parameter: the largest relative L2 difference from
    the oracle's, of gradients scaled to one length. {} where none were saved."""
    found: Rounding = {}
    step = 1
    while (theirs := read_gradients(oracle, step)) is not None:
        told = []
        for run in runs:  # one run's gradients in memory at a time
            if (ours := read_gradients(run, step)) is None:
                return found
            told.append(turned_gradients(ours, theirs))
        found[step] = {name: max(differences[name] for differences in told) for name in theirs}
        step += 1
    return found


def write_rounding(rounding: Rounding, folder: Path) -> None:
    """Leave it for `read_rounding`."""
    write_json(folder / FILE, rounding)


def read_rounding(folder: Path) -> Rounding:
    """What was left there; {} where nothing was."""
    try:
        told: Mapping[str, dict[str, float]] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except OSError:
        return {}
    return {int(step): differences for step, differences in told.items()}
