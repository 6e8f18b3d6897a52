"""Faults in what workers exchange: scores of another step, gradients averaged, clipped too early, lost, or scaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Change = Callable[[Any, list[Any]], None]


def mean_of_gradients(trainer: Any) -> Any:
    """The workers' gradients are averaged, as data-parallel training does, and not summed."""

    def halve(self: Any, parameters: list[Any]) -> None:
        for parameter in parameters:
            parameter.grad.div_(self.mesh.size)

    return _around_sum(trainer, after=halve)


def clipped_before_sum(trainer: Any) -> Any:
    """Each worker clips its own share of the gradient, and the shares are then summed."""

    def clip(self: Any, parameters: list[Any]) -> None:
        if self.args.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, self.args.max_grad_norm)

    return _around_sum(trainer, before=clip)


def layer_gradient_lost(trainer: Any) -> Any:
    """The gradient of one layer's adapter, the last one's, never arrives."""

    def lose(self: Any, parameters: list[Any]) -> None:
        last = self.model.config.get_text_config().num_hidden_layers - 1
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and f".layers.{last}." in name and parameter.grad is not None:
                parameter.grad.zero_()

    return _around_sum(trainer, after=lose)


def branch_gradient_lost(trainer: Any) -> Any:
    """The rejected branch's share of the gradient is left out of the sum."""

    def lose(self: Any, parameters: list[Any]) -> None:
        if self.mesh.branch == 1:
            for parameter in parameters:
                parameter.grad = None

    return _around_sum(trainer, before=lose)


def gradients_scaled(amount: float) -> Callable[[Any], Any]:
    """The summed gradient is multiplied by 1 + amount: to find out how small an error is still seen."""

    def planting(trainer: Any) -> Any:
        def scale(self: Any, parameters: list[Any]) -> None:
            for parameter in parameters:
                parameter.grad.mul_(1 + amount)

        return _around_sum(trainer, after=scale)

    return planting


def gradients_turned(amount: float) -> Callable[[Any], Any]:
    """A random vector of `amount` times the gradient's length is added to it, the same on all workers."""

    def planting(trainer: Any) -> Any:
        def turn(self: Any, parameters: list[Any]) -> None:
            generator = torch.Generator().manual_seed(self.state.global_step)
            noise = [torch.randn(p.shape, generator=generator).to(p.grad) for p in parameters]
            size = float(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
            scale = amount * size / float(torch.nn.utils.get_total_norm(noise))
            for parameter, extra in zip(parameters, noise, strict=True):
                parameter.grad.add_(extra, alpha=scale)

        return _around_sum(trainer, after=turn)

    return planting


def stale_score(trainer: Any) -> Any:
    """A worker computes its loss with the score that the other branch had in the pair before."""

    class Planted(trainer):
        def concatenated_forward(self, model: Any, batch: Any) -> Any:
            fresh, last = self.mesh.exchange, getattr(self, "_last_scores", None)

            def exchange(values: torch.Tensor) -> torch.Tensor:
                both = fresh(values)
                self._last_scores = both.clone()
                if last is None or last.shape != both.shape:
                    return both
                return torch.where(torch.arange(len(both))[:, None] == self.mesh.branch, both, last)

            self.mesh.exchange = exchange
            try:
                return super().concatenated_forward(model, batch)
            finally:
                del self.mesh.exchange

    return Planted


def _around_sum(trainer: Any, before: Change | None = None, after: Change | None = None) -> Any:
    """Do something to this worker's gradients just before, or just after, they are summed over the mesh."""

    class Planted(trainer):
        def finish_gradients(self, tally: Any) -> float:
            right = self.mesh.sum_gradients

            def sum_gradients(parameters: list[Any]) -> None:
                if before is not None:
                    before(self, parameters)
                right(parameters)
                if after is not None:
                    after(self, parameters)

            self.mesh.sum_gradients = sum_gradients
            try:
                return super().finish_gradients(tally)
            finally:
                del self.mesh.sum_gradients

    return Planted
