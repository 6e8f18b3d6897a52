"""How far a strategy is from the oracle: step by step, quantity by quantity, and the adapters at the end.

    parity = measure(Path("runs/X/oracle"), Path("runs/X/branch_parallel"))
    parity.max_loss, parity.steps[0].gradient

Differences are absolute for losses and scores, relative for gradients, norms, rates and adapters; all are taken in
float64. What they mean is for tolerances.py (float32) and noise.py (bfloat16) to say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from traceforge_core.comparison.replay import AdamW, replayed
from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.adapters import read_adapter, read_application, relative_difference
from traceforge_core.training.records import StepRecord, read_gradients, read_records

Rounding = dict[int, dict[str, float]]
"""By step and parameter: by how much rounding alone makes a gradient differ, relative (rounding.py)."""
WIDER = 3.0  # a right strategy's gradient may round so many times as much as the oracle's in the worst of a few ways
ADAM_EPSILON = 1e-8  # of torch and transformers
MUST_START_EQUAL = ("adapter", "data order", "tokenizer")


@dataclass(frozen=True, slots=True)
class StepDifference:
    """One step, candidate against oracle. loss, score_chosen, score_rejected, grad_norm: absolute differences.

    data: None where both took the same pairs in the same order, else what is wrong. scored_tokens: candidate minus
    oracle; None where either did not count. learning_rate, norm: relative differences, norm's of the gradients'
    lengths. size: of the numbers the oracle's loss is made of (β times the larger score, or the loss itself), and so of
    its rounding. reach: |gradient|·|weights|, the most that the loss can change by for a relative change of the
    weights. weights: relative L2 distance of the adapters before this step, estimated from sketches; weights_b: of
    their B matrices alone. workers_apart: as the candidate recorded it. From saved gradients, else None: gradient,
    gradient_parameter: the largest relative L2 difference of a parameter's gradient, and whose; gradient_overall: of
    all together; direction, direction_parameter: the same once both are scaled to unit length over all parameters, so
    that a wrong factor does not show here, of the parameter that is furthest beyond what rounding explains; explained:
    how much of it that is, 0 where it was not measured. turned: by how much the step may part the adapters, relative to
    their size, only because entries of the gradients that are hardly more than rounding have another sign; 0 without
    gradients. unexplained: how much of `weights` does not follow from the gradients each run saved (replay.py).
    """

    step: int
    loss: float
    score_chosen: float
    score_rejected: float
    grad_norm: float
    data: str | None = None
    scored_tokens: int | None = None
    learning_rate: float = 0.0
    norm: float = 0.0
    weights: float | None = None
    weights_b: float | None = None
    workers_apart: float = 0.0
    size: float = 1.0
    reach: float = 0.0
    gradient: float | None = None
    gradient_parameter: str | None = None
    gradient_overall: float | None = None
    direction: float | None = None
    direction_parameter: str | None = None
    explained: float = 0.0
    turned: float = 0.0
    unexplained: float | None = None


@dataclass(frozen=True, slots=True)
class Parity:
    """All differences between an oracle and a candidate. `unequal`: what they did not have in common from the start.
    adapter: final adapters, relative L2; adapter_worst: of the tensor that differs most, adapter_parameter.
    unexplained: how much of `adapter` does not follow from the gradients each run saved (replay.py); None where they
    are not all there. applied: in what the saved adapters are put to use otherwise, in words; None: in nothing."""

    steps: list[StepDifference]
    adapter: float
    adapter_parameter: str
    adapter_worst: float
    unequal: list[str] = field(default_factory=list)
    unexplained: float | None = None
    applied: str | None = None

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


def measure(oracle: Path, candidate: Path, rounding: Rounding | None = None) -> Parity:
    """Compare two finished stages. `rounding`: what rounding does to the oracle's gradients, where that is known.

    Raises TraceForgeError where one is incomplete or their numbers of steps differ.
    """
    ours, theirs = read_steps(candidate), read_steps(oracle)
    if len(ours) != len(theirs):
        raise TraceForgeError(
            f"{candidate.name} took {len(ours)} steps and {oracle.name} {len(theirs)}: they cannot be compared step by "
            "step. Train both again with the same data and settings."
        )
    pairs = list(zip(ours, theirs, strict=True))
    unequal = unequal_starts(oracle, candidate)
    replay = None if unequal else replayed(oracle, candidate, AdamW.of(read_training(oracle)), pairs)
    steps = [
        _step(own, reference) | _gradients(oracle, candidate, reference, (rounding or {}).get(reference.step, {}))
        for own, reference in pairs
    ]
    for step in steps:
        step["unexplained"] = replay.unexplained.get(step["step"]) if replay else None
    overall, worst_name, worst = relative_difference(
        read_adapter(candidate / "adapter"), read_adapter(oracle / "adapter")
    )
    found = [StepDifference(**step) for step in steps]
    final = replay.final if replay else None
    return Parity(found, overall, worst_name, worst, unequal, final, _applied(oracle, candidate))


def _applied(oracle: Path, candidate: Path) -> str | None:
    ours, theirs = (read_application(stage / "adapter") for stage in (candidate, oracle))
    if ours is None or theirs is None:
        return None
    told = [f"{name} is {own}, the oracle's {theirs[name]}" for name, own in ours.items() if own != theirs[name]]
    return ", ".join(told) or None


def read_steps(stage: Path) -> list[StepRecord]:
    """A finished stage's step log. Raises TraceForgeError where it has none."""
    try:
        return read_records(stage / "metrics.jsonl")
    except OSError as error:
        raise TraceForgeError(f"{stage} has no step log ({error.strerror}). Run that stage again.") from None


def read_training(stage: Path) -> dict[str, Any]:
    """What a finished stage noted about its start and surroundings."""
    try:
        content: dict[str, Any] = json.loads((stage / "training.json").read_text(encoding="utf-8"))
        return content
    except (OSError, ValueError) as error:
        raise TraceForgeError(f"{stage} has no training.json ({error}). Run that stage again.") from None


def unequal_starts(oracle: Path, candidate: Path) -> list[str]:
    """What must be equal before the first step and is not."""
    ours, theirs = read_training(candidate), read_training(oracle)
    names = list(MUST_START_EQUAL)
    if (ours["backend"], ours["device"]) == (theirs["backend"], theirs["device"]):
        names.append("base weights")  # another backend names and packs them in its own way
    return [name for name in names if ours["start"].get(name) != theirs["start"].get(name)]


def _step(own: StepRecord, reference: StepRecord) -> dict[str, Any]:
    from traceforge_core.training.sketch import norm

    counted = own.scored_tokens, reference.scored_tokens
    return {
        "step": reference.step,
        "loss": _difference(own.loss, reference.loss),
        "score_chosen": _difference(own.score_chosen, reference.score_chosen),
        "score_rejected": _difference(own.score_rejected, reference.score_rejected),
        "grad_norm": _difference(own.grad_norm, reference.grad_norm),
        "data": _data(own.data, reference.data),
        "scored_tokens": counted[0] - counted[1] if counted[0] and counted[1] else None,
        "learning_rate": _relative(own.learning_rate, reference.learning_rate),
        "norm": _relative(own.grad_norm, reference.grad_norm),
        "weights": _sketched(own.weights_sketch, reference.weights_sketch),
        "weights_b": _sketched(own.b_sketch, reference.b_sketch),
        "workers_apart": own.workers_apart or 0.0,
        "size": max(abs(reference.loss), _scale(reference)),
        "reach": (reference.grad_norm or 0.0) * (norm(reference.weights_sketch) if reference.weights_sketch else 0.0),
    }


def _scale(record: StepRecord) -> float:
    """β times the larger score: margin is β·(score_chosen - score_rejected)."""
    chosen, rejected = record.score_chosen or 0.0, record.score_rejected or 0.0
    beta = abs((record.margin or 0.0) / (chosen - rejected)) if chosen != rejected else 1.0
    return beta * max(abs(chosen), abs(rejected))


def _data(own: str | None, reference: str | None) -> str | None:
    if own is None or reference is None or own == reference:
        return None
    return "the workers saw different pairs" if "+" in own else "other pairs, or the same in another order"


def _sketched(own: list[float] | None, reference: list[float] | None) -> float | None:
    """Relative distance of what was sketched."""
    from traceforge_core.training.sketch import distance, norm

    if own is None or reference is None:
        return None
    size = norm(reference)
    return distance(own, reference) / size if size else 0.0


def turned_gradients(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    """Relative L2 difference of each parameter's gradient, all of `ours` scaled to the length of all of `theirs`. {}
    where either is zero."""
    own_length, length = (
        math.sqrt(sum(_squared(gradient.double()) for gradient in gradients.values())) for gradients in (ours, theirs)
    )
    if not (own_length and length):
        return {}
    return {
        name: relative_difference({name: ours[name].double() * (length / own_length)}, {name: theirs[name]})[0]
        for name in theirs
    }


def _gradients(oracle: Path, candidate: Path, reference: StepRecord, rounding: Mapping[str, float]) -> dict[str, Any]:
    from traceforge_core.training.sketch import norm

    ours, theirs = (read_gradients(stage, reference.step) for stage in (candidate, oracle))
    if ours is None or theirs is None:
        return {}
    overall, worst_name, worst = relative_difference(ours, theirs)
    rate, size = reference.learning_rate or 0.0, norm(reference.weights_sketch or [0.0])
    turned = rate * math.sqrt(sum(_turned(ours[name], theirs[name]) for name in theirs)) / size if size else 0.0
    found: dict[str, Any] = {
        "turned": turned,
        "gradient": worst,
        "gradient_parameter": worst_name,
        "gradient_overall": overall,
    }
    if turned_by := turned_gradients(ours, theirs):
        explained = {name: WIDER * rounding.get(name, 0.0) for name in turned_by}
        beyond = {name: turned_by[name] - explained[name] for name in turned_by}
        name = max(beyond, key=lambda one: (math.isnan(beyond[one]), beyond[one]))
        found |= {"direction_parameter": name, "direction": turned_by[name], "explained": explained[name]}
    return found


def _turned(own: Any, reference: Any) -> float:
    """How far AdamW's first steps with these gradients would be apart, squared, at a rate of 1: a step is the sign of
    the gradient, so that an entry of rounding and nothing else moves its weight by a whole step either way."""
    ours, theirs = (gradient / gradient.abs().add_(ADAM_EPSILON) for gradient in (own.double(), reference.double()))
    return _squared(ours.sub_(theirs))


def _squared(values: Any) -> float:
    """The square of a tensor's length, in one pass and without a copy."""
    flat = values.reshape(-1)
    return float(flat @ flat)


def _difference(own: float | None, reference: float | None) -> float:
    if own is None or reference is None:
        return 0.0 if own is reference else math.nan
    return abs(own - reference)


def _relative(own: float | None, reference: float | None) -> float:
    difference = _difference(own, reference)
    return difference / abs(reference) if reference else (math.inf if difference else difference)


def _largest(values: Any) -> float:
    """The largest value; NaN where there is any (max() would hide it)."""
    found = list(values)
    return math.nan if any(math.isnan(value) for value in found) else max(found, default=0.0)
