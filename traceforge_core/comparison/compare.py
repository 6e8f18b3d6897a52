"""The stage that compares every trained strategy with the oracle: report.json, report.md, loss.png."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traceforge_core.comparison.parity import judge, measure, read_steps, read_training
from traceforge_core.comparison.plots import plot_losses
from traceforge_core.comparison.report import Compared, write_report
from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError

logger = logging.getLogger(__name__)

CANDIDATES = ("branch_parallel", "shared_prefix")
# Several verdicts make one: a failure anywhere fails, and what is undecided keeps the whole from passing.
_SEVERITY = {"pass": 0, "undecided": 1, "fail": 2}


def compare(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> dict[str, Any]:
    """Compare what is there with the oracle. Figures: the verdict ("pass", "fail", or "undecided" in bfloat16) and,
    for each strategy, its verdict and largest differences. A failed verdict is a result, not an error.

    Raises TraceForgeError where no strategy but the oracle was trained, or one cannot be compared.
    """
    found = [name for name in CANDIDATES if name in inputs]
    if not found:
        raise TraceForgeError(
            "There is nothing to compare: this run has the oracle, but neither branch_parallel nor shared_prefix. Run "
            "one of them first."
        )
    oracle = inputs["oracle"]
    compared = []
    for name in found:
        parity = measure(oracle, inputs[name])
        verdict = judge(parity, config.comparison, config.model.dtype)
        compared.append(Compared(name, parity, verdict, read_training(inputs[name]), read_steps(inputs[name])))
        logger.info("%s against the oracle: %s (%s).", name, verdict.outcome, "; ".join(verdict.reasons))
    reference = Compared("oracle", None, None, read_training(oracle), read_steps(oracle))
    overall = max((one.verdict.outcome for one in compared if one.verdict), key=_SEVERITY.__getitem__)
    plot_losses(reference, compared, out_dir / "loss.png")
    write_report(overall, reference, compared, out_dir)
    return {"verdict": overall} | {one.name: _figures(one) for one in compared}


def _figures(one: Compared) -> dict[str, Any]:
    assert one.parity is not None and one.verdict is not None
    return {
        "verdict": one.verdict.outcome,
        "max_loss_difference": one.parity.max_loss,
        "max_gradient_difference": one.parity.max_gradient,
        "adapter_difference": one.parity.adapter,
        "steps": len(one.parity.steps),
        "gradient_steps": one.parity.gradient_steps,
    }
