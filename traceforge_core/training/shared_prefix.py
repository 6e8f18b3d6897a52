"""Shared-prefix SimPO: both branches of a pair on one worker, in one sequence, so that the prompt is computed once.

With D workers it is data parallelism over pairs (see PairTrainer). The sequence is always computed in tiles
(`traceforge_core.longcontext`): only there does the rejected completion see the prompt without seeing the chosen one.
"""

from __future__ import annotations

from typing import Any

import torch

from traceforge_core.longcontext.shared_prefix_attention import Pair, pair_log_probs
from traceforge_core.training.branch_parallel import BRANCHES, mean_nll
from traceforge_core.training.pair_trainer import PairTrainer
from traceforge_core.training.pairs import IGNORED


class SharedPrefixTrainer(PairTrainer):
    """PairTrainer whose worker computes whole pairs, each in one pass."""

    tiles = "on"

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> Any:
        pairs = [_pair(batch, row) for row in range(len(batch["pair_id"]))]
        log_probs, branch = pair_log_probs(model, pairs)
        self.note_scored(torch.ones_like(branch, dtype=torch.bool))
        # TRL pads both branches to the longer one.
        length = max(batch[f"{name}_input_ids"].shape[1] for name in BRANCHES)
        chosen, rejected = _scores(log_probs, branch, batch, length)
        self.require_finite_scores(batch, chosen, rejected)
        no_logits = torch.zeros(1, device=chosen.device)
        of_chosen = log_probs[branch % 2 == 0]
        nll = mean_nll(of_chosen, torch.ones_like(of_chosen)) if self.cpo_alpha > 0 else chosen.new_zeros(())
        return chosen, rejected, no_logits, no_logits, nll


def _pair(batch: dict[str, Any], row: int) -> Pair:
    """One pair of a padded batch without its padding."""
    parts = []
    prompt = batch["prompt_input_ids"][row][batch["prompt_attention_mask"][row].bool()]
    for name in BRANCHES:
        real = batch[f"{name}_attention_mask"][row].bool()
        parts.append(batch[f"{name}_input_ids"][row][real][len(prompt) :])
        parts.append(batch[f"{name}_labels"][row][real][len(prompt) :] != IGNORED)
    return Pair(prompt, chosen=parts[0], rejected=parts[2], counted_chosen=parts[1], counted_rejected=parts[3])


def _scores(
    log_probs: torch.Tensor, branch: torch.Tensor, batch: dict[str, Any], length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean log-prob of each completion, (pairs,) and (pairs,), summed in TRL's order (see `mean_as_trl`)."""
    scores = []
    for side, name in enumerate(BRANCHES):
        counted = batch[f"{name}_labels"][:, 1:] != IGNORED
        counted = torch.nn.functional.pad(counted, (0, length - 1 - counted.shape[1]))
        # Both run row by row, and within a row from left to right.
        rows = log_probs.new_zeros(counted.shape).masked_scatter(counted, log_probs[branch % 2 == side])
        scores.append(rows.sum(-1) / counted.sum(-1))
    return scores[0], scores[1]
