"""Scores of held-out rows under one model, one sequence at a time, and the figures over them.

Logits are computed for the tokens that are scored and for no others, their log-probabilities in float32 in blocks, so
that a long prompt costs no (length × vocabulary) matrix.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

BLOCK = 1024  # rows of (vocabulary) float32 logits at a time: 0.6 GB at 152K


@dataclass(frozen=True, slots=True)
class PairScore:
    """chosen, rejected: ā, mean log-probability (nats) per token that counts; *_tokens: how many count."""

    pair_id: str
    case: str
    miner: str
    chosen: float
    rejected: float
    chosen_tokens: int
    rejected_tokens: int


@dataclass(frozen=True, slots=True)
class ActionScore:
    """loss: sum of -log p (nats) over the `tokens` that are in the loss; correct: how many of them are the model's
    first choice, given the recorded tokens before them."""

    sample_id: str
    case: str
    loss: float
    tokens: int
    correct: int


@torch.no_grad()
def token_logps(model: Any, ids: Sequence[int], positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(ids[i] | ids[:i]) for each i in `positions` (ascending, none 0), and whether ids[i] is the likeliest.

    Both (len(positions),) on the CPU: float32 in nats, and bool.
    """
    device = next(model.parameters()).device
    # Nothing behind the last scored token matters, and it must not be paid for.
    inputs = torch.tensor([list(ids[: positions[-1]])], device=device)
    before = torch.tensor(positions, device=device) - 1
    targets = torch.tensor([ids[i] for i in positions], device=device)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    options = {"logits_to_keep": before} if "logits_to_keep" in inspect.signature(base.forward).parameters else {}
    # As in training: with bf16 weights, float32 adapters take part in bf16 products.
    with torch.autocast(device.type, torch.bfloat16, enabled=_dtype(model) == torch.bfloat16):
        logits = model(input_ids=inputs, use_cache=False, **options).logits[0]
    if logits.shape[0] != len(positions):  # a model that does not know logits_to_keep gives all of them
        logits = logits[before]
    logps, likeliest = [], []
    for block, wanted in zip(logits.split(BLOCK), targets.split(BLOCK), strict=True):
        block = block.float()
        logps.append(block.gather(1, wanted[:, None])[:, 0] - block.logsumexp(1))
        likeliest.append(block.argmax(1) == wanted)
    return torch.cat(logps).cpu(), torch.cat(likeliest).cpu()


def _dtype(model: Any) -> torch.dtype:
    dtype: torch.dtype = model.get_input_embeddings().weight.dtype
    return dtype


def score_pair(model: Any, row: dict[str, Any]) -> PairScore:
    """Both branches of a pair, with the prompt computed for each (as the oracle does)."""
    scores = []
    for branch in ("chosen", "rejected"):
        start = len(row["prompt_ids"])
        positions = [start + i for i, counts in enumerate(row[f"{branch}_mask"]) if counts]
        logps, _ = token_logps(model, row["prompt_ids"] + row[f"{branch}_ids"], positions)
        scores.append((float(logps.double().mean()), len(positions)))
    (chosen, chosen_tokens), (rejected, rejected_tokens) = scores
    names = row["pair_id"], row["case"], row["miner"]
    return PairScore(*names, chosen, rejected, chosen_tokens, rejected_tokens)


def score_action(model: Any, row: dict[str, Any]) -> ActionScore:
    """One SFT sample; the tokens in the loss are those whose label is not -100."""
    positions = [i for i, label in enumerate(row["labels"]) if label != -100 and i > 0]
    logps, likeliest = token_logps(model, row["input_ids"], positions)
    loss = -float(logps.double().sum())
    return ActionScore(row["sample_id"], row["case"], loss, len(positions), int(likeliest.sum()))


def pair_figures(scores: Sequence[PairScore], beta: float, gamma: float) -> dict[str, Any]:
    """pairs, accuracy (share with ā_chosen > ā_rejected), margin (mean of β·(ā_chosen - ā_rejected)), mean scores, loss
    (SimPO's, with β and γ), and length_correlation: Pearson's r of ā_chosen - ā_rejected with the difference in tokens
    (far from 0: the score follows length; None where either does not vary)."""
    differences = [score.chosen - score.rejected for score in scores]
    lengths = [float(score.chosen_tokens - score.rejected_tokens) for score in scores]
    count = len(scores)
    return {
        "pairs": count,
        "accuracy": sum(difference > 0 for difference in differences) / count,
        "margin": beta * math.fsum(differences) / count,
        "score_chosen": math.fsum(score.chosen for score in scores) / count,
        "score_rejected": math.fsum(score.rejected for score in scores) / count,
        "loss": math.fsum(_softplus(gamma - beta * difference) for difference in differences) / count,
        "length_correlation": correlation(differences, lengths),
    }


def action_figures(scores: Sequence[ActionScore]) -> dict[str, Any]:
    """actions, tokens, loss (mean of -log p over all tokens, nats), token_accuracy, and exact: share of actions whose
    every token is the model's first choice (what greedy decoding would reproduce whole)."""
    tokens = sum(score.tokens for score in scores)
    return {
        "actions": len(scores),
        "tokens": tokens,
        "loss": math.fsum(score.loss for score in scores) / tokens,
        "token_accuracy": sum(score.correct for score in scores) / tokens,
        "exact": sum(score.correct == score.tokens for score in scores) / len(scores),
    }


def correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson's r, or None with fewer than three points or where one side does not vary."""
    count = len(first)
    if count < 3:
        return None
    mean_first, mean_second = math.fsum(first) / count, math.fsum(second) / count
    a, b = [x - mean_first for x in first], [y - mean_second for y in second]
    size = math.sqrt(math.fsum(x * x for x in a) * math.fsum(y * y for y in b))
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / size if size > 0 else None


def _softplus(x: float) -> float:
    """log(1 + e^x) = -log σ(-x), without overflow."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
