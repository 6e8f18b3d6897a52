"""Branch-Parallel SimPO: the chosen and the rejected completion of a pair on a worker each.

    L = f(s_c, s_r), and s_c needs only the chosen branch, s_r only the rejected one. Each worker computes its own score
    with a graph, gets the other's as a number, and computes the same L with TRL's own code. Its backward gives
    ∂L/∂s_own · ∂s_own/∂θ, and the SUM over the two workers is ∂L/∂θ.

Three things are new against TRL: the branch forward, the exchange of scores, and the sum of gradients (in PairTrainer,
for it is the same for any mesh). Logits exist only at positions that predict a completion token that counts.
"""

from __future__ import annotations

from typing import Any

import torch
from trl.trainer.utils import selective_log_softmax

from traceforge_core.longcontext.enable import computes_in_tiles, kept_log_probs
from traceforge_core.training.pair_trainer import PairTrainer
from traceforge_core.training.pairs import IGNORED

BRANCHES = ("chosen", "rejected")


class BranchParallelTrainer(PairTrainer):
    """PairTrainer whose worker computes one branch of every pair.

    To compute a branch in another way (tiled layers, log-probs straight from hidden states), override `branch_scores`.
    To compute both branches on one worker (a shared prefix), inherit from PairTrainer and override
    `concatenated_forward` instead; with replicas each worker then computes whole pairs.
    """

    tiles = "as configured"

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> Any:
        branch = self.mesh.branch
        scores, nll = self.branch_scores(model, batch, BRANCHES[branch])
        self.beat(f"waiting at step {self.state.global_step + 1} for the other branch's score")
        message = torch.cat([scores.detach(), nll.detach()[None]]).double().cpu()
        both = self.mesh.exchange(message).to(scores)
        chosen = scores if branch == 0 else both[0, :-1]
        rejected = scores if branch == 1 else both[1, :-1]
        self.require_finite_scores(batch, chosen, rejected)
        no_logits = torch.zeros(1, device=scores.device)
        return chosen, rejected, no_logits, no_logits, nll if branch == 0 else both[0, -1]

    def branch_scores(self, model: Any, batch: dict[str, Any], branch: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The score ā of each completion of a branch, (pairs,), and the mean NLL of all its tokens that count, a scalar
        (0 where it is not needed). Both with a graph, in at least float32."""
        log_probs, counted, positions = completion_log_probs(
            model,
            batch[f"{branch}_input_ids"],
            batch[f"{branch}_attention_mask"],
            batch[f"{branch}_labels"],
            keeps_tail=self.keeps_tail,
        )
        self.note_scored(counted)
        # TRL pads both branches to the longer one.
        length = max(batch[f"{name}_input_ids"].shape[1] for name in BRANCHES)
        scores = mean_as_trl(log_probs, counted, positions, length)
        return scores, mean_nll(log_probs, counted) if branch == "chosen" and self.cpo_alpha > 0 else scores.new_zeros(
            ()
        )


def mean_as_trl(log_probs: torch.Tensor, counted: torch.Tensor, positions: torch.Tensor, length: int) -> torch.Tensor:
    """The mean of each row's log-probs that count, (rows,), from (rows, kept) values at (kept,) positions of `length`.

    Summed in TRL's order, over a row of zeros with the values in their places: a float32 score of 5 has steps of 5e-7,
    so that another order of summation alone would show in the loss.
    """
    rows = log_probs.new_zeros(log_probs.shape[0], length - 1).index_copy(1, positions, log_probs * counted)
    return rows.sum(-1) / counted.sum(-1)


def mean_nll(log_probs: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """TRL's cross entropy over the tokens of all rows that count, a scalar. Summed in float64."""
    return (-(log_probs.double() * counted).sum() / counted.sum()).to(log_probs.dtype)


def completion_log_probs(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    labels: torch.Tensor,
    *,
    keeps_tail: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the labelled tokens, from logits at their positions only.

    input_ids, attention_mask, labels: (rows, length), padded on either side; labels are -100 where a token does not
    count. Kept are the positions whose next token counts in any row: (rows, kept) log-probs in float32 or wider,
    (rows, kept) bool, which of them count in that row, and (kept,) those positions. `keeps_tail`: ask the model for its
    last positions instead.
    """
    if computes_in_tiles(model, input_ids.shape[1]):
        return kept_log_probs(model, input_ids, attention_mask, labels)
    targets = labels[:, 1:]
    positions = (targets != IGNORED).any(0).nonzero().flatten()
    length = input_ids.shape[1]
    tail = length - int(positions[0])
    logits = model(
        input_ids, attention_mask=attention_mask, use_cache=False, logits_to_keep=tail if keeps_tail else positions
    ).logits
    if logits.shape[1] != len(positions):  # the tail, or everything, came back
        logits = logits[:, positions - (length - logits.shape[1])]
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    targets = targets[:, positions]
    counted = targets != IGNORED
    return selective_log_softmax(logits, targets.masked_fill(~counted, 0)), counted, positions
