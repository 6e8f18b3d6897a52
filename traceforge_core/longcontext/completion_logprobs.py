"""Log-probabilities of chosen tokens straight from hidden states: the full logits never exist.

    logps = selected_log_probs(head, hidden, targets, chunk=1024)

`head` is the model's lm_head; `hidden` are states after the final norm at the positions that predict `targets`. The
logits of a chunk are computed in the model's dtype, turned to float32 (float64 stays) and used up; the backward
computes them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def selected_log_probs(head: nn.Module, hidden: Tensor, targets: Tensor, chunk: int = 1024) -> Tensor:
    """log p(target) in nats, (rows,), at least float32, differentiable in hidden and in what trains in the head.

    hidden: (rows, width). targets: (rows,) token ids. chunk: rows whose logits exist at once.
    """
    parts = []
    for start in range(0, hidden.shape[0], chunk):
        rows, ids = hidden[start : start + chunk], targets[start : start + chunk]
        if torch.is_grad_enabled():
            parts.append(checkpoint(_chunk, head, rows, ids, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_chunk(head, rows, ids))
    if not parts:
        return hidden.new_zeros(0, dtype=torch.promote_types(hidden.dtype, torch.float32))
    return torch.cat(parts)


def _chunk(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    weight = getattr(head, "weight", None)
    if isinstance(weight, Tensor) and weight.is_floating_point() and not torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(weight.dtype)
    log_probs: Tensor = _SelectedLogProb.apply(head(hidden), targets)  # type: ignore[no-untyped-call]
    return log_probs


class _SelectedLogProb(torch.autograd.Function):
    """log-softmax at one index a row. Keeps the logits as they came; its gradient is made in one buffer."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = torch.logsumexp(wide, dim=-1)
        chosen = wide.gather(-1, targets[:, None])[:, 0]
        ctx.save_for_backward(logits, total, targets)
        return chosen - total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, total, targets = ctx.saved_tensors
        # d log p(target) / d logits = onehot(target) - softmax
        grad = torch.sub(logits, total[:, None]).exp_().mul_(-grads[0][:, None])
        grad.scatter_add_(-1, targets[:, None], grads[0][:, None].to(grad.dtype))
        return grad.to(logits.dtype), None
