"""Faults after the gradients: the optimizer's step and the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def schedule_off_by_one(trainer: Any) -> Any:
    """The learning-rate schedule is a step ahead."""

    class Planted(trainer):
        def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
            scheduler = super().create_scheduler(*args, **kwargs)
            scheduler.optimizer._step_count = 1  # else torch warns of a step before the optimizer's
            scheduler.step()
            return scheduler

    return Planted


def one_rank_steps(trainer: Any) -> Any:
    """Only the chosen branch's worker takes the optimizer's step."""

    class Planted(trainer):
        def finish_gradients(self, tally: Any) -> float:
            lacking = super().finish_gradients(tally)
            if self.mesh.branch == 1:
                for parameter in self.trained_parameters():
                    parameter.grad = None
            return lacking

    return Planted


def one_rank_steps_unwatched(trainer: Any) -> Any:
    """The same, in a trainer that does not look whether its workers' weights stay equal."""

    stepping: Any = one_rank_steps(trainer)

    class Planted(stepping):
        workers_may_be_apart = float("inf")

    return Planted


def adam_beta2(trainer: Any) -> Any:
    """AdamW forgets squared gradients as some large-batch recipes have it (β2 = 0.95): seen from the third step on."""

    class Planted(trainer):
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            optimizer = super().create_optimizer(*args, **kwargs)
            for group in optimizer.param_groups:
                group["betas"] = (group["betas"][0], 0.95)
            return optimizer

    return Planted


def rate_off(amount: float) -> Callable[[Any], Any]:
    """The weights move as with a learning rate of 1 + amount times what is logged: to find out how small an error is
    still seen in the adapter alone."""

    def planting(trainer: Any) -> Any:
        class Planted(trainer):
            def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
                optimizer = super().create_optimizer(*args, **kwargs)
                right = optimizer.step

                def step(*args: Any, **kwargs: Any) -> Any:
                    rates = [group["lr"] for group in optimizer.param_groups]
                    for group in optimizer.param_groups:
                        group["lr"] *= 1 + amount
                    try:
                        return right(*args, **kwargs)
                    finally:
                        for group, rate in zip(optimizer.param_groups, rates, strict=True):
                            group["lr"] = rate

                optimizer.step = step
                return optimizer

        return Planted

    return planting
