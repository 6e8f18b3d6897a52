"""How far a strategy is from the oracle: losses, scores and gradients step by step, and the adapters at the end.

    parity = measure(Path("runs/X/oracle"), Path("runs/X/branch_parallel"))
    verdict = judge(parity, config.comparison, dtype="float32")

Differences are absolute for losses and scores, relative (L2) for gradients and adapters; all are taken in float64.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from traceforge_core.config import ComparisonConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.adapters import read_adapter, relative_difference
from traceforge_core.training.records import StepRecord, read_records

MUST_START_EQUAL = ("adapter", "data order", "tokenizer")


@dataclass(frozen=True, slots=True)
class StepDifference:
    """One step. loss, score_chosen, score_rejected, grad_norm: absolute differences. gradient, gradient_parameter: the
    largest relative L2 difference of a parameter's gradient, and whose; gradient_overall: of all gradients together;
    None where no gradients were saved."""

    step: int
    loss: float
    score_chosen: float
    score_rejected: float
    grad_norm: float
    gradient: float | None = None
    gradient_parameter: str | None = None
    gradient_overall: float | None = None


@dataclass(frozen=True, slots=True)
class Parity:
    """All differences between an oracle and a candidate. `unequal`: what they did not have in common from the start."""

    steps: list[StepDifference]
    adapter: float
    adapter_parameter: str
    adapter_worst: float
    unequal: list[str] = field(default_factory=list)

    @property
    def max_loss(self) -> float:
        return _largest(step.loss for step in self.steps)

    @property
    def max_score(self) -> float:
        return _largest(max(step.score_chosen, step.score_rejected) for step in self.steps)

    @property
    def max_gradient(self) -> float | None:
        saved = [step.gradient for step in self.steps if step.gradient is not None]
        return _largest(saved) if saved else None

    @property
    def gradient_steps(self) -> int:
        return sum(step.gradient is not None for step in self.steps)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "max_loss": self.max_loss,
            "max_score": self.max_score,
            "max_gradient": self.max_gradient,
            "gradient_steps": self.gradient_steps,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """`outcome`: "pass", "fail", or "undecided" (no yardstick for this precision). `reasons`: what it rests on."""

    outcome: str
    reasons: list[str]


def measure(oracle: Path, candidate: Path) -> Parity:
    """Compare two finished stages. Raises TraceForgeError where one is incomplete or their numbers of steps differ."""
    ours, theirs = read_steps(candidate), read_steps(oracle)
    if len(ours) != len(theirs):
        raise TraceForgeError(
            f"{candidate.name} took {len(ours)} steps and {oracle.name} {len(theirs)}: they cannot be compared step by "
            "step. Train both again with the same data and settings."
        )
    steps = [
        StepDifference(
            step=reference.step,
            loss=_difference(own.loss, reference.loss),
            score_chosen=_difference(own.score_chosen, reference.score_chosen),
            score_rejected=_difference(own.score_rejected, reference.score_rejected),
            grad_norm=_difference(own.grad_norm, reference.grad_norm),
            **_gradients(oracle, candidate, reference.step),
        )
        for own, reference in zip(ours, theirs, strict=True)
    ]
    overall, worst_name, worst = relative_difference(
        read_adapter(candidate / "adapter"), read_adapter(oracle / "adapter")
    )
    return Parity(steps, overall, worst_name, worst, _unequal(oracle, candidate))


def judge(parity: Parity, tolerances: ComparisonConfig, dtype: str) -> Verdict:
    """Whether the candidate computes the oracle's function.

    In float32 the configured tolerances decide. In bfloat16 two right implementations differ by rounding alone, so a
    fixed tolerance could not tell right from wrong: what must hold exactly is checked (equal start, finite numbers),
    and the rest stays undecided.
    """
    if parity.unequal:
        return Verdict("fail", [f"not the same from the start: {', '.join(parity.unequal)}"])
    if not parity.steps:
        return Verdict("fail", ["no step was taken"])
    measured = [parity.max_loss, parity.adapter] + ([parity.max_gradient] if parity.max_gradient is not None else [])
    if not all(math.isfinite(value) for value in measured):
        return Verdict("fail", ["a loss, gradient or weight is NaN or inf, or zero on one side only"])
    if dtype != "float32":
        return Verdict(
            "undecided",
            [
                f"the start is equal and all numbers are finite; in {dtype} rounding alone makes differences, so the "
                "tolerances for float32 do not apply and the differences are stated without a judgement",
            ],
        )
    limits = [
        ("loss, largest difference at any step", parity.max_loss, tolerances.loss_atol),
        ("final adapter, relative L2 difference", parity.adapter, tolerances.adapter_rtol),
    ]
    if parity.max_gradient is not None:
        name = f"gradients of {parity.gradient_steps} steps, largest relative L2 difference of a parameter"
        limits.insert(1, (name, parity.max_gradient, tolerances.gradient_rtol))
    reasons = [
        f"{name}: {value:.3g} ({'within' if value <= limit else 'over'} {limit:g})" for name, value, limit in limits
    ]
    if parity.max_gradient is None:
        reasons.append("gradients were not saved (comparison.gradient_steps is 0), so they were not compared")
    return Verdict("pass" if all(value <= limit for _, value, limit in limits) else "fail", reasons)


def read_steps(stage: Path) -> list[StepRecord]:
    """A finished stage's step log. Raises TraceForgeError where it has none."""
    try:
        return read_records(stage / "metrics.jsonl")
    except OSError as error:
        raise TraceForgeError(f"{stage} has no step log ({error.strerror}). Run that stage again.") from None


def read_training(stage: Path) -> dict[str, Any]:
    """What a finished stage noted about its start and surroundings."""
    try:
        return json.loads((stage / "training.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceForgeError(f"{stage} has no training.json ({error}). Run that stage again.") from None


def _unequal(oracle: Path, candidate: Path) -> list[str]:
    ours, theirs = read_training(candidate), read_training(oracle)
    names = list(MUST_START_EQUAL)
    if (ours["backend"], ours["device"]) == (theirs["backend"], theirs["device"]):
        names.append("base weights")  # another backend names and packs them in its own way
    return [name for name in names if ours["start"].get(name) != theirs["start"].get(name)]


def _gradients(oracle: Path, candidate: Path, step: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    name = f"gradients/step-{step:05d}.safetensors"
    if not ((oracle / name).exists() and (candidate / name).exists()):
        return {}
    overall, worst_name, worst = relative_difference(load_file(candidate / name), load_file(oracle / name))
    return {"gradient": worst, "gradient_parameter": worst_name, "gradient_overall": overall}


def _difference(own: float | None, reference: float | None) -> float:
    if own is None or reference is None:
        return 0.0 if own is reference else math.nan
    return abs(own - reference)


def _largest(values: Any) -> float:
    """The largest value; NaN where there is any (max() would hide it)."""
    found = list(values)
    return math.nan if any(math.isnan(value) for value in found) else max(found, default=0.0)
