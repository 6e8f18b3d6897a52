"""Faults between the scores and the gradients: the loss's constants, the adapter's scale, the order of the data."""

from __future__ import annotations

import math
from typing import Any


def gamma_not_divided(trainer: Any) -> Any:
    """γ is subtracted from the score difference as it is, where γ/β belongs: the margin becomes β·γ."""
    return _with_gamma(trainer, lambda self: self.simpo_gamma * self.beta)


def gamma_divided_twice(trainer: Any) -> Any:
    """γ, absolute, is taken for the ratio γ/β that SimPO's own configurations give, and divided again."""
    return _with_gamma(trainer, lambda self: self.simpo_gamma / self.beta)


def lora_scaling_off(trainer: Any) -> Any:
    """The adapter's output is multiplied by alpha/sqrt(r), as rank-stabilised LoRA does, and not by alpha/r."""

    class Planted(trainer):
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            layers = [module for module in self.model.modules() if isinstance(getattr(module, "scaling", None), dict)]
            before = [dict(layer.scaling) for layer in layers]
            for layer in layers:
                for name in layer.scaling:
                    layer.scaling[name] *= math.sqrt(layer.r[name])
            try:
                return super().training_step(model, *args, **kwargs)
            finally:
                for layer, scaling in zip(layers, before, strict=True):
                    layer.scaling.update(scaling)

    return Planted


def data_order(trainer: Any) -> Any:
    """One worker (the only one, where there is one) goes through the pairs in an order of its own."""

    class Planted(trainer):
        train_dataset: Any

        def get_train_dataloader(self) -> Any:
            right = self.train_dataset
            if self.mesh.rank == self.mesh.size - 1:
                self.train_dataset = _Turned(right)
            try:
                return super().get_train_dataloader()
            finally:
                self.train_dataset = right

    return Planted


def loss_not_averaged(trainer: Any) -> Any:
    """The loss is not divided by the number of accumulated micro-batches before its backward."""

    class Planted(trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, return_outputs, **kwargs)
            times = self.args.gradient_accumulation_steps
            return (loss[0] * times, loss[1]) if return_outputs else loss * times

    return Planted


def _with_gamma(trainer: Any, gamma: Any) -> Any:
    class Planted(trainer):
        simpo_gamma: float

        def cpo_loss(self, *scores: Any) -> Any:
            right = self.simpo_gamma
            self.simpo_gamma = gamma(self)
            try:
                return super().cpo_loss(*scores)
            finally:
                self.simpo_gamma = right

    return Planted


class _Turned:
    """A dataset that begins with its second item."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> Any:
        return self._inner[(index + 1) % len(self._inner)]
