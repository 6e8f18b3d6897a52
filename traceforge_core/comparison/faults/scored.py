"""Faults in which tokens are scored, and in how their log-probabilities become a score.

Each makes a trainer class from a trainer class. The batch is changed before the strategy sees it, so that the mistake
is the same whatever the strategy: `labels` decide what is scored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from traceforge_core.training.pairs import IGNORED

Batch = dict[str, Any]
BRANCHES = ("chosen", "rejected")


def prompt_in_score(trainer: Any) -> Any:
    """The prompt was not masked out of the labels."""
    return _with_labels(trainer, lambda ids, mask, labels: ids.masked_fill(mask == 0, IGNORED))


def observations_in_score(trainer: Any) -> Any:
    """Whatever follows the prompt counts, also what the environment said in the middle of a completion."""

    def relabel(ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        begun = (labels != IGNORED).cumsum(-1) > 0
        return ids.masked_fill(~begun | (mask == 0), IGNORED)

    return _with_labels(trainer, relabel)


def eos_dropped(trainer: Any) -> Any:
    """The last token of each completion, which ends the turn, does not count."""

    def relabel(ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        counted = labels != IGNORED
        last = counted & (counted.flip(-1).cumsum(-1).flip(-1) == 1)
        return labels.masked_fill(last & (counted.sum(-1, keepdim=True) > 1), IGNORED)

    return _with_labels(trainer, relabel)


def logits_one_short(trainer: Any) -> Any:
    """`logits_to_keep` is the completion's length, without the one that predicts its first token."""

    def relabel(ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        counted = labels != IGNORED
        first = counted & (counted.cumsum(-1) == 1)
        return labels.masked_fill(first & (counted.sum(-1, keepdim=True) > 1), IGNORED)

    return _with_labels(trainer, relabel)


def label_shift(trainer: Any) -> Any:
    """Labels are not shifted: a position is scored on the token that it has just read."""

    def relabel(ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(labels[:, :1], IGNORED), labels[:, :-1]], dim=-1)

    return _with_labels(trainer, relabel)


def sum_of_log_probs(trainer: Any) -> Any:
    """A score is the sum of the log-probabilities, not their mean."""

    class Planted(trainer):
        def concatenated_forward(self, model: Any, batch: Batch) -> Any:
            chosen, rejected, *rest = super().concatenated_forward(model, batch)
            tokens = [(batch[f"{branch}_labels"][:, 1:] != IGNORED).sum(-1) for branch in BRANCHES]
            return chosen * tokens[0], rejected * tokens[1], *rest

    return Planted


def branches_swapped(trainer: Any) -> Any:
    """The chosen completion is taken for the rejected one."""

    class Planted(trainer):
        def concatenated_forward(self, model: Any, batch: Batch) -> Any:
            chosen, rejected, *rest = super().concatenated_forward(model, batch)
            return rejected, chosen, *rest

    return Planted


def score_off(amount: float) -> Callable[[Any], Any]:
    """The chosen score is off by `amount` nats: to find out how small an error is still seen."""

    def planting(trainer: Any) -> Any:
        class Planted(trainer):
            def concatenated_forward(self, model: Any, batch: Batch) -> Any:
                chosen, *rest = super().concatenated_forward(model, batch)
                return chosen + amount, *rest

        return Planted

    return planting


def _with_labels(trainer: Any, relabel: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """`relabel(input_ids, attention_mask, labels) -> labels`, all (rows, length), for both branches."""

    class Planted(trainer):
        def concatenated_forward(self, model: Any, batch: Batch) -> Any:
            changed = dict(batch)
            for branch in BRANCHES:
                ids, mask, labels = (batch[f"{branch}_{name}"] for name in ("input_ids", "attention_mask", "labels"))
                changed[f"{branch}_labels"] = relabel(ids, mask, labels)
            return super().concatenated_forward(model, changed)

    return Planted
