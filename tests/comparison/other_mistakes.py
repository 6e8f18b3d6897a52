"""Mistakes that are in no list of ours, in trainers that real workers load (`Job.trainer` = "other_mistakes:Name").

Each is one that somebody who writes or changes a strategy could make, and says what the report must point at.
"""

from __future__ import annotations

from typing import Any

import torch

from traceforge_core.training.branch_parallel import BRANCHES, BranchParallelTrainer
from traceforge_core.training.shared_prefix import SharedPrefixTrainer

Batch = dict[str, Any]


class BetaTwice(BranchParallelTrainer):
    """Scores are multiplied by β, and their difference again."""

    points_at = ("loss",)

    def cpo_loss(self, chosen: torch.Tensor, rejected: torch.Tensor) -> Any:
        return super().cpo_loss(self.beta * chosen, self.beta * rejected)


class SmoothingOfTheOtherSign(BranchParallelTrainer):
    """Label smoothing is added where it is to be taken off."""

    points_at = ("loss",)

    def cpo_loss(self, chosen: torch.Tensor, rejected: torch.Tensor) -> Any:
        self.label_smoothing = -abs(self.label_smoothing)
        return super().cpo_loss(chosen, rejected)


class NllOfTheOtherBranch(BranchParallelTrainer):
    """The NLL term of `cpo_alpha` is the rejected completion's."""

    points_at = ("loss",)

    def concatenated_forward(self, model: Any, batch: Batch) -> Any:
        chosen, rejected, *rest = super().concatenated_forward(model, batch)
        return chosen, rejected, *rest[:-1], -rejected.mean()


class NllWithoutGradient(BranchParallelTrainer):
    """The NLL term is in the loss, and detached."""

    points_at = ("gradient direction",)

    def concatenated_forward(self, model: Any, batch: Batch) -> Any:
        *rest, nll = super().concatenated_forward(model, batch)
        return *rest, nll.detach()


class OthersRowsReversed(BranchParallelTrainer):
    """With several pairs a batch, the other branch's scores come in the wrong order."""

    points_at = ("loss",)

    def concatenated_forward(self, model: Any, batch: Batch) -> Any:
        chosen, rejected, *rest = super().concatenated_forward(model, batch)
        return (chosen, rejected.flip(0), *rest) if self.mesh.branch == 0 else (chosen.flip(0), rejected, *rest)


class OthersScoreRounded(BranchParallelTrainer):
    """Scores travel as float16."""

    points_at = ("score",)

    def concatenated_forward(self, model: Any, batch: Batch) -> Any:
        chosen, rejected, *rest = super().concatenated_forward(model, batch)
        if self.mesh.branch == 0:
            return chosen, rejected.half().float(), *rest
        return chosen.half().float(), rejected, *rest


class OneWorkerHearsWrong(BranchParallelTrainer):
    """The rejected branch's worker gets the chosen score rounded to bfloat16; the other worker is right."""

    points_at = ("score",)

    def concatenated_forward(self, model: Any, batch: Batch) -> Any:
        chosen, *rest = super().concatenated_forward(model, batch)
        return chosen if self.mesh.branch == 0 else chosen.bfloat16().float(), *rest


class OneWorkerHasAnotherBeta(BranchParallelTrainer):
    """As where one of two hosts has an older configuration, and its β is 0.1% larger."""

    points_at = ("loss",)

    def cpo_loss(self, chosen: torch.Tensor, rejected: torch.Tensor) -> Any:
        right = self.beta
        self.beta = right * (1 + 1e-3 * self.mesh.branch)
        try:
            return super().cpo_loss(chosen, rejected)
        finally:
            self.beta = right


class DropoutLeftOn(BranchParallelTrainer):
    """The adapter's dropout is not switched off, and every worker draws its own."""

    points_at = ("score",)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        layers = [module for name, module in self.model.named_modules() if name.endswith("lora_dropout")]
        right = [dict(layer) for layer in layers]
        for layer in layers:
            layer["default"] = torch.nn.Dropout(0.05)
        try:
            return super().training_step(*args, **kwargs)
        finally:
            for layer, before in zip(layers, right, strict=True):
                layer.update(before)


class PaddedLeftAndAttendedTo(BranchParallelTrainer):
    """Batches are padded on the left, and the mask says so to nobody."""

    points_at = ("score",)

    def concatenated_forward(self, model: Any, batch: Batch) -> Any:
        changed = dict(batch)
        for branch in BRANCHES:
            mask = batch[f"{branch}_attention_mask"]
            padding = (mask == 0).sum(-1).tolist()
            for name in ("input_ids", "labels"):
                rows = zip(batch[f"{branch}_{name}"], padding, strict=True)
                changed[f"{branch}_{name}"] = torch.stack([row.roll(shift) for row, shift in rows])
            changed[f"{branch}_attention_mask"] = torch.ones_like(mask)
        return super().concatenated_forward(model, changed)


class PromptWithoutItsFirstToken(BranchParallelTrainer):
    """Prompts lose one token on the left, as where a BOS token is taken for the tokenizer's own."""

    points_at = ("score",)

    def concatenated_forward(self, model: Any, batch: Batch) -> Any:
        names = [f"{branch}_{name}" for branch in BRANCHES for name in ("input_ids", "attention_mask", "labels")]
        return super().concatenated_forward(model, batch | {name: batch[name][:, 1:] for name in names})


class LastMicroBatchLate(BranchParallelTrainer):
    """The gradient of a step's last micro-batch is counted to the next step."""

    points_at = ("gradient direction", "gradient norm")
    late: list[torch.Tensor] | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.accelerator.gradient_state.sync_gradients:
            return super().training_step(*args, **kwargs)
        before = [parameter.grad.clone() for parameter in self.trained_parameters() if parameter.grad is not None]
        right = self.mesh.sum_gradients

        def sum_gradients(parameters: Any) -> None:
            last, self.late = self.late, [p.grad - old for p, old in zip(parameters, before, strict=True)]
            for number, (parameter, old) in enumerate(zip(parameters, before, strict=True)):
                parameter.grad.copy_(old + last[number] if last else old)
            right(parameters)

        self.mesh.sum_gradients = sum_gradients  # type: ignore[method-assign, assignment]
        try:
            return super().training_step(*args, **kwargs)
        finally:
            del self.mesh.sum_gradients


class ClippedOneByOne(BranchParallelTrainer):
    """Every parameter's gradient is clipped by its own length."""

    points_at = ("adapter",)

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        length = torch.nn.utils.get_total_norm([p.grad for p in self.trained_parameters() if p.grad is not None])
        for parameter in self.trained_parameters():
            torch.nn.utils.clip_grad_norm_([parameter], self.args.max_grad_norm)
        return length


class MomentsForgotten(BranchParallelTrainer):
    """The optimizer begins anew at the second step, as after a checkpoint without its state."""

    points_at = ("adapter",)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        optimizer: Any = self.optimizer
        if self.state.global_step == 1:
            optimizer.state.clear()
        return super().training_step(*args, **kwargs)


class DecayOnOneWorker(BranchParallelTrainer):
    """Weights decay on the rejected branch's worker only: not the one whose adapter is saved."""

    points_at = ("adapter",)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01 * self.mesh.branch
        return optimizer


class ModuleLeftOut(SharedPrefixTrainer):
    """No gradient ever comes to the adapters of one kind of module, as where a forward of ours goes around them."""

    points_at = ("gradient direction",)

    def finish_gradients(self, tally: Any) -> float:
        for name, parameter in self.model.named_parameters():
            if ".down_proj." in name:
                parameter.grad = None
        return super().finish_gradients(tally)
