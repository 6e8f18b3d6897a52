"""The faults that can be planted, and what the comparison's report must point at when one is.

    for fault in faults_of("branch_parallel"):
        job = dataclasses.replace(job, planted_fault=fault.name)

A fault is a function from a trainer class to one that makes the mistake. Only `Job.planted_fault` can ask for it,
which no configuration reaches. Names with an amount ("gradients_scaled:0.01") measure how small an error is still seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from traceforge_core.comparison.faults import exchanged, objective, prefix, scored, update
from traceforge_core.training.job import STRATEGIES

TWO_BRANCHES = ("branch_parallel",)
ONE_SEQUENCE = ("shared_prefix",)

DATA, TOKENS, SCORE, LOSS = "data order", "scored tokens", "score", "loss"
DIRECTION, NORM, RATE, ADAPTER = "gradient direction", "gradient norm", "learning rate", "adapter"


@dataclass(frozen=True, slots=True)
class Fault:
    """plant: trainer class in, trainer class that makes the mistake out; its docstring says which. points_at: what the
    report must name first, any of them. strategies: where the mistake can be made. needs: what data or settings must
    have for the mistake to change anything ("observations", "clipping"). stopped: the workers themselves must refuse to
    go on, so that there is nothing to compare."""

    name: str
    plant: Callable[[Any], Any]
    points_at: tuple[str, ...]
    strategies: tuple[str, ...] = STRATEGIES
    needs: str | None = None
    stopped: bool = False

    @property
    def what(self) -> str:
        return (self.plant.__doc__ or "").strip()


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("data_order", objective.data_order, (DATA,)),
        Fault("prompt_in_score", scored.prompt_in_score, (TOKENS,), TWO_BRANCHES),
        Fault("observations_in_score", scored.observations_in_score, (TOKENS,), needs="observations"),
        Fault("eos_dropped", scored.eos_dropped, (TOKENS,)),
        Fault("logits_one_short", scored.logits_one_short, (TOKENS,)),
        Fault("label_shift", scored.label_shift, (SCORE, TOKENS), TWO_BRANCHES),
        Fault("label_shift_in_prefix", prefix.label_shift_in_prefix, (SCORE,), ONE_SEQUENCE),
        Fault("rejected_sees_chosen", prefix.rejected_sees_chosen, (SCORE,), ONE_SEQUENCE),
        Fault("positions_not_restarted", prefix.positions_not_restarted, (SCORE,), ONE_SEQUENCE),
        Fault("rejected_predicted_by_chosen", prefix.rejected_predicted_by_chosen, (SCORE,), ONE_SEQUENCE),
        Fault("sum_of_log_probs", scored.sum_of_log_probs, (SCORE,)),
        Fault("branches_swapped", scored.branches_swapped, (SCORE,)),
        Fault("stale_score", exchanged.stale_score, (SCORE,), TWO_BRANCHES),
        Fault("lora_scaling_off", objective.lora_scaling_off, (SCORE,)),
        Fault("gamma_not_divided", objective.gamma_not_divided, (LOSS,)),
        Fault("gamma_divided_twice", objective.gamma_divided_twice, (LOSS,)),
        Fault("loss_not_averaged", objective.loss_not_averaged, (NORM, LOSS), needs="accumulation"),
        Fault("mean_of_gradients", exchanged.mean_of_gradients, (NORM,), TWO_BRANCHES),
        Fault("clipped_before_sum", exchanged.clipped_before_sum, (NORM, DIRECTION), TWO_BRANCHES, needs="clipping"),
        Fault("layer_gradient_lost", exchanged.layer_gradient_lost, (DIRECTION,)),
        Fault("branch_gradient_lost", exchanged.branch_gradient_lost, (DIRECTION, NORM), TWO_BRANCHES),
        Fault("schedule_off_by_one", update.schedule_off_by_one, (RATE,)),
        Fault("one_rank_steps", update.one_rank_steps, (ADAPTER,), TWO_BRANCHES, stopped=True),
        Fault("one_rank_steps_unwatched", update.one_rank_steps_unwatched, (ADAPTER,), TWO_BRANCHES),
        Fault("adam_beta2", update.adam_beta2, (ADAPTER,)),
    )
}
GRADED: dict[str, Callable[[float], Callable[[Any], Any]]] = {
    "score_off": scored.score_off,
    "gradients_scaled": exchanged.gradients_scaled,
    "gradients_turned": exchanged.gradients_turned,
    "rate_off": update.rate_off,
}


def faults_of(strategy: str) -> list[Fault]:
    """The faults that this strategy could have, in the order of a step: data, scores, loss, gradients, update."""
    return [fault for fault in FAULTS.values() if strategy in fault.strategies]


def plant(name: str, trainer: Any) -> Any:
    """The trainer class that makes the mistake. Raises KeyError for a name that is no fault."""
    kind, graded, amount = name.partition(":")
    planted = GRADED[kind](float(amount))(trainer) if graded else FAULTS[kind].plant(trainer)
    planted.__name__ = planted.__qualname__ = trainer.__name__
    return planted
