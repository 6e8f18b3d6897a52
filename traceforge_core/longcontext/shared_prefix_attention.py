"""Both branches of a pair in one sequence, [prompt, chosen, rejected]: the prompt is computed once.

    log_probs, branch = pair_log_probs(model, [Pair(prompt, chosen, rejected, counted_chosen, counted_rejected)])

The rejected completion has the position ids it would have behind the prompt and attends to the prompt and to itself,
never to the chosen one: three attention blocks (prompt and chosen, causal; rejected to prompt, full; rejected to
itself, causal), the last two merged by their log-sum-exp. No mask and no special kernel, so every SDPA backend does it.
The first token of each completion is predicted by the prompt's last position, which is kept twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from traceforge_core.errors import TraceForgeError
from traceforge_core.longcontext.attention import Block
from traceforge_core.longcontext.completion_logprobs import selected_log_probs
from traceforge_core.longcontext.enable import causal_lm_of, decoder_of, settings_of
from traceforge_core.longcontext.families import why_no_shared_prefix
from traceforge_core.longcontext.stack import run_stack


@dataclass(frozen=True, slots=True)
class Pair:
    """Token ids of a prompt and its two completions, each (tokens,), and which completion tokens count (bool)."""

    prompt: Tensor
    chosen: Tensor
    rejected: Tensor
    counted_chosen: Tensor
    counted_rejected: Tensor


@dataclass(frozen=True, slots=True)
class SharedPrefixBatch:
    """Pairs as one flat sequence. ids, positions: (tokens,). keep: rows that predict targets, both (kept,).

    branch: (kept,), 2·pair for a chosen token, 2·pair + 1 for a rejected one.
    """

    ids: Tensor
    positions: Tensor
    blocks: list[Block]
    keep: Tensor
    targets: Tensor
    branch: Tensor


def lay_out(pairs: Sequence[Pair]) -> SharedPrefixBatch:
    """All pairs behind each other, each with its prompt once. Raises ValueError where a prompt or a completion is
    empty: the first token of a completion is predicted by the prompt's last."""
    ids, positions, keep, targets, branch = [], [], [], [], []
    blocks: list[Block] = []
    start = 0
    for number, pair in enumerate(pairs):
        prompt, chosen, rejected = len(pair.prompt), len(pair.chosen), len(pair.rejected)
        if not (prompt and chosen and rejected):
            raise ValueError(f"Pair {number} has {prompt} + {chosen} and {rejected} tokens; no part may be empty.")
        device = pair.prompt.device
        ids += [pair.prompt, pair.chosen, pair.rejected]
        places = torch.arange(prompt + max(chosen, rejected), device=device)
        positions += [places[: prompt + chosen], places[prompt : prompt + rejected]]
        middle, end = start + prompt + chosen, start + prompt + chosen + rejected
        blocks += [
            Block(start, middle, start, middle, causal=True),
            Block(middle, end, start, start + prompt, causal=False),
            Block(middle, end, middle, end, causal=True),
        ]
        last = start + prompt - 1
        for side, (completion, counted, first) in enumerate(
            ((pair.chosen, pair.counted_chosen, start + prompt), (pair.rejected, pair.counted_rejected, middle))
        ):
            rows = torch.arange(first - 1, first + len(completion) - 1, device=device)
            rows[0] = last
            counted = counted.bool()
            keep.append(rows[counted])
            targets.append(completion[counted])
            branch.append(torch.full_like(targets[-1], 2 * number + side))
        start = end
    return SharedPrefixBatch(
        torch.cat(ids), torch.cat(positions), blocks, torch.cat(keep), torch.cat(targets), torch.cat(branch)
    )


def pair_log_probs(model: nn.Module, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """(log-probs, branch) of every completion token that counts; see `SharedPrefixBatch.branch`.

    The model must be enabled for long context (`enable_long_context`, any length). Raises TraceForgeError for models
    whose layers attend over a sliding window, or whose rotary embedding depends on the sequence's length.
    """
    batch = lay_out(pairs)
    decoder, settings = decoder_of(model), settings_of(model)
    if reason := why_no_shared_prefix(decoder.config):
        raise TraceForgeError(reason)
    x = decoder.embed_tokens(batch.ids)
    hidden = run_stack(decoder, x, batch.positions, batch.blocks, settings, keep=batch.keep)
    head = causal_lm_of(model).lm_head
    return selected_log_probs(head, hidden, batch.targets, settings.logprob_chunk), batch.branch
