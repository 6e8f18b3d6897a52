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

from traceforge_core.comparison.compare import judge
from traceforge_core.comparison.faults.registry import FAULTS, faults_of
from traceforge_core.comparison.noise_floor import Floor, read_floor, run_floor, write_floor
from traceforge_core.comparison.parity import measure
from traceforge_core.comparison.series import run_series
from traceforge_core.comparison.verdict import Verdict
from traceforge_core.config import RunConfig
from traceforge_core.training.job import Job, Kind
from traceforge_core.training.stages import oracle_job, preference_job

logger = logging.getLogger(__name__)
CLEAN = "clean"


@dataclass(frozen=True, slots=True)
class Detection:
    """What the comparison said of one planted fault (or of none, CLEAN). outcome: pass, fail, or stopped, where the
    workers themselves refused to go on. pointed_at, step: what is wrong first. left: all quantities that left their
    limits. statistic: the first one's, in units of its limit."""

    fault: str
    outcome: str
    pointed_at: str | None
    step: int | None
    left: tuple[str, ...]
    statistic: float
    reason: str

    @property
    def caught(self) -> bool:
        return self.outcome in ("fail", "stopped")

    @property
    def right(self) -> bool:
        """Whether the report points at what was done (for a clean run: whether it raises no alarm)."""
        if self.fault == CLEAN:
            return self.outcome == "pass"
        expected = FAULTS[self.fault]
        return self.outcome == "stopped" if expected.stopped else self.pointed_at in expected.points_at


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
    can have; names with an amount are allowed). An oracle and a noise floor that lie in `folder` already are used
    again."""
    oracle = train_oracle_in(config, inputs, folder / "oracle")
    floor = Floor([])
    if config.model.dtype != "float32":
        floor = _floor(config, {**inputs, "oracle": oracle}, folder / "noise")
    names = [CLEAN, *(faults if faults is not None else [fault.name for fault in faults_of(strategy)])]
    base = replace(
        preference_job(strategy, config, inputs, folder), held_out=None, cut_to=config.comparison.oracle_max_length
    )
    jobs = {
        name: replace(
            base,
            out_dir=folder / strategy / name.replace(":", "_"),
            planted_fault=None if name == CLEAN else name,
            transport="gloo" if share_gpu else base.transport,
        )
        for name in names
    }
    stopped = run_series(jobs, folder / strategy, share_gpu=share_gpu)
    found = []
    for name, job in jobs.items():
        if (message := stopped[name]) is not None:
            found.append(Detection(name, "stopped", None, None, (), float("inf"), message))
        else:
            found.append(detection(name, judge(config, oracle, job.out_dir, measure(oracle, job.out_dir), floor)))
        logger.info("%s in %s: %s, %s", name, strategy, found[-1].outcome, found[-1].reason)
    return Rehearsal(strategy, found, floor)


def clean_runs(
    config: RunConfig, inputs: Mapping[str, Path], folder: Path, strategy: Kind, seeds: Sequence[int]
) -> list[Detection]:
    """The clean strategy against the oracle with each seed (another order of the data): no alarm may be raised.

    In bfloat16 every seed's data gives its own noise floor to be judged against, which multiplies the work.
    """
    told = []
    configs = {
        seed: config.model_copy(update={"preference": config.preference.model_copy(update={"seed": seed})})
        for seed in seeds
    }
    oracles = {str(s): replace(oracle_job(c, inputs, folder / f"o{s}"), held_out=None) for s, c in configs.items()}
    strategies = {
        str(seed): replace(
            preference_job(strategy, one, inputs, folder / f"c{seed}"),
            held_out=None,
            cut_to=config.comparison.oracle_max_length,
        )
        for seed, one in configs.items()
    }
    run_series(oracles, folder / "oracles")
    run_series(strategies, folder / "strategies")
    for seed, one in configs.items():
        oracle, candidate = oracles[str(seed)].out_dir, strategies[str(seed)].out_dir
        floor = Floor([])
        if config.model.dtype != "float32":
            floor = _floor(one, {**inputs, "oracle": oracle}, folder / f"noise{seed}")
        told.append(detection(CLEAN, judge(config, oracle, candidate, measure(oracle, candidate), floor)))
    return told


def train_oracle_in(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> Path:
    """The oracle's run in that folder, trained unless it is there."""
    job: Job = replace(oracle_job(config, inputs, out_dir / "run"), held_out=None)
    if not (job.out_dir / "training.json").exists():
        run_series({"oracle": job}, out_dir)
    return job.out_dir


def detection(fault: str, verdict: Verdict) -> Detection:
    """A verdict as what it says of a planted fault."""
    first = verdict.first
    share = 0.0
    if first is not None:
        share = abs(first.value) / first.limit if first.limit else float("inf")
    return Detection(
        fault,
        verdict.outcome,
        first.quantity if first else None,
        first.step if first else None,
        tuple(finding.quantity for finding in verdict.findings),
        share,
        verdict.reasons[0],
    )


def _floor(config: RunConfig, inputs: Mapping[str, Path], folder: Path) -> Floor:
    if (folder / "noise.json").exists():
        return read_floor(folder)
    folder.mkdir(parents=True, exist_ok=True)
    floor = run_floor(config, inputs, folder)
    write_floor(floor, folder)
    return floor
