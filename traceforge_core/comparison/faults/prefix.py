"""Faults that only a shared prefix can have: in who sees whom, in positions, and in what predicts what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch


def rejected_sees_chosen(trainer: Any) -> Any:
    """The rejected completion attends to the chosen one as well: nothing was masked."""

    def open_up(batch: Any) -> Any:
        blocks = list(batch.blocks)
        for index, block in enumerate(blocks):
            if not block.causal:
                blocks[index] = replace(block, k_end=block.q_start)
        return replace(batch, blocks=blocks)

    return _with_layout(trainer, open_up)


def positions_not_restarted(trainer: Any) -> Any:
    """Position ids of the rejected completion go on from the chosen one's, and not from the prompt's."""

    def count_on(batch: Any) -> Any:
        starts = (batch.positions == 0).cumsum(0) - 1
        first = (batch.positions == 0).nonzero().flatten()
        places = torch.arange(len(batch.positions), device=batch.positions.device)
        return replace(batch, positions=places - first[starts])

    return _with_layout(trainer, count_on)


def label_shift_in_prefix(trainer: Any) -> Any:
    """Labels are not shifted: a position is scored on the token that it has just read."""
    return _with_layout(trainer, lambda batch: replace(batch, targets=batch.ids[batch.keep]))


def rejected_predicted_by_chosen(trainer: Any) -> Any:
    """The rejected completion's first token is predicted by the token before it, the chosen one's last."""

    def straight(batch: Any) -> Any:
        keep = batch.keep.clone()
        rejected = batch.branch % 2 == 1
        first = rejected & torch.cat([torch.ones_like(rejected[:1]), ~rejected[:-1]])
        starts = [block.q_start for block in batch.blocks if not block.causal]
        keep[first] = torch.tensor(starts, device=keep.device) - 1
        return replace(batch, keep=keep)

    return _with_layout(trainer, straight)


def _with_layout(trainer: Any, change: Callable[[Any], Any]) -> Any:
    class Planted(trainer):
        def concatenated_forward(self, model: Any, batch: Any) -> Any:
            from traceforge_core.longcontext import shared_prefix_attention as place

            right = place.lay_out
            place.lay_out = lambda pairs: change(right(pairs))
            try:
                return super().concatenated_forward(model, batch)
            finally:
                place.lay_out = right

    return Planted
