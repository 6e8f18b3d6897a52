"""The stage that compares every trained strategy with the oracle: report.md, report.html, report.json and three plots.

In float32 fixed tolerances decide (tolerances.py). In bfloat16 the oracle's own noise does, as the stage noise_floor
measured it (noise.py), together with what that stage found in float32 on a part of the model. Where faults were planted
(planted_faults.py), one that was missed fails the whole.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traceforge_core.comparison.deviations import deviations
from traceforge_core.comparison.noise import allowed_at_steps, judge_by_noise, place
from traceforge_core.comparison.noise_floor import Floor, read_exact, read_floor
from traceforge_core.comparison.parity import Parity, measure, read_steps, read_training
from traceforge_core.comparison.planted_faults import read_planted
from traceforge_core.comparison.plots import plot_differences, plot_losses, plot_margins
from traceforge_core.comparison.report import Compared, Trained, write_report
from traceforge_core.comparison.rounding import read_rounding
from traceforge_core.comparison.tolerances import judge_exactly, step_limits
from traceforge_core.comparison.verdict import Finding, Verdict, judge_without_yardstick
from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.training.job import STRATEGIES

logger = logging.getLogger(__name__)

# Several verdicts make one: a failure anywhere fails, and what is undecided keeps the whole from passing.
SEVERITY = {"pass": 0, "undecided": 1, "fail": 2}


def compare(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> dict[str, Any]:
    """Compare what is there with the oracle. Figures: the verdict ("pass", "fail", or "undecided" in bfloat16 without a
    noise floor) and, for each strategy, its verdict, what is wrong first, and its largest differences. A failed verdict
    is a result, not an error.

    Raises TraceForgeError where no strategy but the oracle was trained, or one cannot be compared.
    """
    found = [name for name in STRATEGIES if name in inputs]
    if not found:
        raise TraceForgeError(
            "There is nothing to compare: this run has the oracle, but neither branch_parallel nor shared_prefix. Run "
            "one of them first."
        )
    oracle = inputs["oracle"]
    floor = read_floor(inputs["noise_floor"]) if "noise_floor" in inputs else Floor([])
    exact = read_exact(inputs["noise_floor"]) if "noise_floor" in inputs else {}
    rounding = read_rounding(inputs["noise_floor"]) if "noise_floor" in inputs else {}
    compared = []
    for name in found:
        folder = _compared_folder(inputs[name])
        parity = measure(oracle, folder, rounding)
        verdict = judge(config, oracle, folder, parity, floor)
        training, steps = read_training(folder), read_steps(folder)
        compared.append(Compared(name, training, steps, parity, verdict, exact.get(name)))
        logger.info("%s against the oracle: %s (%s).", name, verdict.outcome, "; ".join(verdict.reasons))
    reference = Trained("oracle", read_training(oracle), read_steps(oracle))
    overall = max((_together(one.verdict.outcome, one.exact) for one in compared), key=SEVERITY.__getitem__)
    curves = {one.name: one.steps for one in compared}
    plot_losses(reference.steps, curves, out_dir / "loss.png")
    plot_margins(reference.steps, curves, out_dir / "margin.png")
    measured = {one.name: one.parity for one in compared}
    allowed = _allowed(config, oracle, inputs, measured, floor)
    plot_differences(measured, floor.runs, allowed, out_dir / "difference.png")
    planted = read_planted(inputs["planted_faults"]) if "planted_faults" in inputs else None
    if planted is not None:
        overall = max(overall, planted["verdict"], key=SEVERITY.__getitem__)
    write_report(overall, reference, compared, _evaluation(inputs), planted, out_dir)
    figures = {"verdict": overall} | {one.name: _figures(one) for one in compared}
    return figures | ({} if planted is None else {"planted_faults": planted})


def judge(config: RunConfig, oracle: Path, candidate: Path, parity: Parity, floor: Floor) -> Verdict:
    """By tolerances in float32, by the oracle's noise in bfloat16, without a yardstick where that was not measured."""
    if config.model.dtype == "float32":
        return judge_exactly(parity, config.comparison)
    if not floor.runs or not parity.steps or parity.unequal:
        return judge_without_yardstick(parity, config.comparison, config.model.dtype)
    steps = floor.runs[0].steps
    places = place(deviations(oracle, candidate, steps), floor.runs, config.comparison.confidence)
    return judge_by_noise(parity, places, config.comparison, len(floor.runs))


def _allowed(
    config: RunConfig, oracle: Path, inputs: Mapping[str, Path], measured: Mapping[str, Parity], floor: Floor
) -> dict[str, list[float]]:
    """What loss and gradient's length may differ by at each step, by the strictest strategy's limits."""
    if config.model.dtype == "float32":
        limits = [step_limits(parity, config.comparison) for parity in measured.values()]
        rows = {"loss": [[at.loss for at in its] for its in limits]}
        rows["norm"] = [[at.gradient for at in its] for its in limits]
    elif floor.runs:
        steps = floor.runs[0].steps
        comparable = [name for name, parity in measured.items() if parity.steps and not parity.unequal]
        runs = [deviations(oracle, _compared_folder(inputs[name]), steps) for name in comparable]
        rows = {
            name: [allowed_at_steps(run, floor.runs, config.comparison.confidence, name) for run in runs]
            for name in ("loss", "norm")
        }
    else:
        return {}
    return {name: [min(at) for at in zip(*its, strict=False)] for name, its in rows.items()}


def _together(outcome: str, exact: dict[str, Any] | None) -> str:
    """One outcome of a bfloat16 comparison and the float32 one beside it: a failure of either fails, and where the
    first cannot tell, the second decides."""
    if exact is None or outcome == "fail":
        return outcome
    told: str = exact["outcome"]
    return told


def _wrong_first(verdict: Verdict, exact: dict[str, Any] | None) -> Finding | None:
    """What is wrong first: by the float32 comparison, in which no rounding hides it, or, where that finds nothing or
    there is none, by the verdict."""
    return verdict.first if exact is None or exact["first"] is None else Finding(**exact["first"])


def _compared_folder(strategy: Path) -> Path:
    """Where the run lies that did what the oracle did: `proof/` where the oracle could not hold whole pairs."""
    proof = strategy / "proof"
    return proof if proof.is_dir() else strategy


def _evaluation(inputs: Mapping[str, Path]) -> dict[str, Any] | None:
    if "evaluate" not in inputs:
        return None
    try:
        content: dict[str, Any] | None = json.loads(
            (inputs["evaluate"] / "evaluation.json").read_text(encoding="utf-8")
        )
        return content
    except (OSError, ValueError):
        return None


def _figures(one: Compared) -> dict[str, Any]:
    first = _wrong_first(one.verdict, one.exact)
    return {
        "verdict": _together(one.verdict.outcome, one.exact),
        "first_wrong": f"{first.quantity} at step {first.step}" if first else None,
        "max_loss_difference": one.parity.max_loss,
        "max_gradient_difference": one.parity.max_gradient,
        "adapter_difference": one.parity.adapter,
        "steps": len(one.parity.steps),
        "gradient_steps": one.parity.gradient_steps,
        "statistics": {place.name: place.statistic / place.limit for place in one.verdict.places},
    }
