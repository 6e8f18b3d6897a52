"""Whether the weights moved as AdamW moves them: the optimizer's steps taken again, with the gradients each run saved.

    replay = replayed(oracle, candidate, AdamW.of(training), records)      # None where there is not enough to go by
    replay.unexplained[3]                                                  # relative to the weights, before step 3

Two right runs drift apart: AdamW's first steps are little more than the gradients' signs, and an entry that is all
rounding has either. Limits on how far weights may be apart must allow for that, and a slightly wrong optimizer hides in
the allowance. What a run's own gradients do to its own weights needs none. AdamW's step is linear in the weights, so
the distance of two runs that started as one follows from their gradients alone (Loshchilov and Hutter 2019, algorithm
2), and what is left of it once that is taken off is rounding of 1e-7, or a wrong step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceforge_core.modeling.adapters import read_adapter
from traceforge_core.training.records import StepRecord, read_gradients
from traceforge_core.training.sketch import distance, norm, sketch

if TYPE_CHECKING:
    from torch import Tensor

SAME_RATE = 1e-9
CLIP_EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, slots=True)
class Replay:
    """unexplained: by step, how far the candidate's adapter is before it from where its own gradients lead, relative
    L2, estimated from sketches. final: the same of the final adapters, exactly, where every step's gradients were
    saved, else None."""

    unexplained: dict[int, float]
    final: float | None


@dataclass(frozen=True, slots=True)
class AdamW:
    """What training.json says of the optimizer."""

    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    max_grad_norm: float

    @classmethod
    def of(cls, training: Mapping[str, Any]) -> AdamW | None:
        """None where another optimizer was used, or it is not said which; and in bfloat16, which is judged by noise."""
        told = training.get("optimizer") or {}
        if told.get("name") != "adamw_torch" or training.get("dtype") != "float32":
            return None
        first, second = told["betas"]
        return cls((first, second), told["epsilon"], told["weight_decay"], told["max_grad_norm"])


class Moments:
    """AdamW's state of one run, in float64."""

    def __init__(self, settings: AdamW) -> None:
        self.settings = settings
        self.steps = 0
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}

    def directions(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By what a rate of 1 would move each weight down, after these gradients (not yet clipped)."""
        self.steps += 1
        (beta1, beta2), limit = self.settings.betas, self.settings.max_grad_norm
        doubles = {name: gradient.double() for name, gradient in gradients.items()}
        length = math.sqrt(sum(float(one.square().sum()) for one in doubles.values()))
        clipped = min(1.0, limit / (length + CLIP_EPSILON)) if limit else 1.0
        found = {}
        for name, gradient in doubles.items():
            own = gradient * clipped
            first, second = self.first.get(name, own * 0), self.second.get(name, own * 0)
            self.first[name] = first = beta1 * first + (1 - beta1) * own
            self.second[name] = second = beta2 * second + (1 - beta2) * own.square()
            root = (second / (1 - beta2**self.steps)).sqrt() + self.settings.epsilon
            found[name] = first / (1 - beta1**self.steps) / root
        return found


def replayed(
    oracle: Path, candidate: Path, settings: AdamW | None, records: Sequence[tuple[StepRecord, StepRecord]]
) -> Replay | None:
    """`settings`: the oracle's. `records`: the candidate's and the oracle's, step by step from the first.

    None where the optimizer is not torch's AdamW, a rate differs (which is a finding of its own), or gradients and
    adapter are not of the same weights.
    """
    if settings is None:
        return None
    finals = read_adapter(candidate / "adapter"), read_adapter(oracle / "adapter")
    ours, theirs = Moments(settings), Moments(settings)
    apart: dict[str, Tensor] = {}
    unexplained: dict[int, float] = {}
    for own, reference in records:
        if apart and own.weights_sketch and reference.weights_sketch:
            moved = [mine - its for mine, its in zip(own.weights_sketch, reference.weights_sketch, strict=True)]
            size = norm(reference.weights_sketch) or 1.0
            unexplained[reference.step] = distance(moved, sketch(apart.items())) / size
        mine, its = (read_gradients(stage, reference.step) for stage in (candidate, oracle))
        if mine is None or its is None:
            return Replay(unexplained, None)
        rate = reference.learning_rate or 0.0
        if abs((own.learning_rate or 0.0) - rate) > SAME_RATE * rate:
            return None
        if not mine.keys() == its.keys() == finals[0].keys() == finals[1].keys():
            return None
        down, its_down = ours.directions(mine), theirs.directions(its)
        kept = 1 - rate * settings.weight_decay
        apart = {name: apart.get(name, 0.0) * kept - rate * (down[name] - its_down[name]) for name in down}
    return Replay(unexplained, _left(*finals, apart))


def _left(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], apart: Mapping[str, Tensor]) -> float:
    """How far `ours` is from `theirs` moved by `apart`, relative to `theirs`."""
    left = sum(float((ours[name].double() - theirs[name].double() - apart[name]).square().sum()) for name in apart)
    size = sum(float(one.double().square().sum()) for one in theirs.values())
    return math.sqrt(left / size) if size else 0.0
