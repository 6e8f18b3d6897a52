"""Attention over a flat sequence of tokens, as blocks of queries and keys, with the kernels that SDPA uses.

    backend = choose_backend(device, dtype, head_dim)
    out, lse = attend(q, k, v, blocks, scale, backend)
    dq, dk, dv = attend_backward(grad, q, k, v, out, lse, blocks, scale, backend)

A block lets a range of queries see a range of keys, all of them or causally. A range of queries may appear in several
blocks: their outputs are merged by their log-sum-exp, and the backward of each block, given the merged output and
log-sum-exp, yields its exact share of the gradient (the identity behind ring attention, arXiv 2310.01889). So a
sequence of several samples, a padded batch and a shared prefix are all lists of blocks, and no mask is ever stored.

Backends: `cudnn` (Hopper and newer), `flash` (FlashAttention-2, Ampere and newer), `math` (any device and dtype, a few
query rows at a time). Shapes: q (tokens, heads, head_dim), k and v (tokens, kv_heads, head_dim), lse (heads, tokens).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["cudnn", "flash", "math"]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [q_start, q_end) see keys [k_start, k_end). Causal blocks are square: query i sees keys up to i."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    causal: bool


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Sequence[Block],
    scale: float,
    backend: Backend,
    window: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output like q (written into `out` where given) and its log-sum-exp (heads, tokens), at least float32.

    window: a causal block's query sees at most so many keys, itself included.
    """
    if len(blocks) == 1 and out is None:
        return _forward(q, k, v, blocks[0], scale, backend, window)
    out = torch.empty_like(q) if out is None else out
    lse = torch.empty(q.shape[1], q.shape[0], dtype=_wide(q.dtype), device=q.device)
    seen: set[int] = set()
    for block in blocks:
        queries, keys = slice(block.q_start, block.q_end), slice(block.k_start, block.k_end)
        part, part_lse = _forward(q[queries], k[keys], v[keys], block, scale, backend, window)
        if block.q_start in seen:
            _merge(out[queries], lse[:, queries], part, part_lse)
        else:
            seen.add(block.q_start)
            out[queries] = part
            lse[:, queries] = part_lse
        del part, part_lse
    return out, lse


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    blocks: Sequence[Block],
    scale: float,
    backend: Backend,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given that of the output, the output itself and its log-sum-exp."""
    if len(blocks) == 1:
        return _backward(grad, q, k, v, out, lse, blocks[0], scale, backend, window)
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for block in blocks:
        queries, keys = slice(block.q_start, block.q_end), slice(block.k_start, block.k_end)
        part_q, part_k, part_v = _backward(
            grad[queries], q[queries], k[keys], v[keys], out[queries], lse[:, queries], block, scale, backend, window
        )
        dq[queries] += part_q
        dk[keys] += part_k
        dv[keys] += part_v
        del part_q, part_k, part_v
    return dq, dk, dv


def choose_backend(device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None = None) -> Backend:
    """The fastest backend that works here, found by trying each on a small example. The choice is logged once."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "math"
    candidates: list[Backend] = ["flash"] if window else ["cudnn", "flash"]
    return _first_that_works(tuple(candidates), device, dtype, head_dim)


@cache
def _first_that_works(
    candidates: tuple[Backend, ...], device: torch.device, dtype: torch.dtype, head_dim: int
) -> Backend:
    for backend in candidates:
        major, _ = torch.cuda.get_device_capability(device)
        if backend == "cudnn" and major < 9:
            continue  # works on Ampere too, but FlashAttention-2 is the faster of the two there
        q = torch.randn(128, 4, head_dim, device=device, dtype=dtype)
        kv = q[:, :2].contiguous()
        block = Block(0, 128, 0, 128, causal=True)
        try:
            out, lse = _forward(q, kv, kv, block, 1.0, backend, None)
            _backward(out, q, kv, kv, out, lse, block, 1.0, backend, None)
        except RuntimeError as error:
            log.info("attention backend %s does not run here: %s", backend, str(error).splitlines()[0])
            continue
        log.info("attention backend: %s", backend)
        return backend
    log.warning("attention backend: math (slow); neither cuDNN attention nor FlashAttention runs on this device")
    return "math"


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold a further block's output into out and lse, both in place. out (tokens, heads, dim), lse (heads, tokens)."""
    merged = torch.logaddexp(lse, part_lse)
    keep = torch.exp(lse - merged).t().unsqueeze(-1)
    take = torch.exp(part_lse - merged).t().unsqueeze(-1)
    out.copy_(out * keep + part * take)
    lse.copy_(merged)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float, backend: Backend, window: int | None
) -> tuple[Tensor, Tensor]:
    if backend == "math":
        return _math_forward(q, k, v, block.causal, scale, window)
    if backend == "flash":
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q[None], k[None], v[None], None, None, q.shape[0], k.shape[0], 0.0, block.causal, False,
            scale=scale, **_flash_window(block.causal, window),
        )  # fmt: skip
        return out[0], lse[0]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        _heads_first(q), _heads_first(k), _heads_first(v), None, True, 0.0, block.causal, False, scale=scale
    )
    return out[0].transpose(0, 1), lse.reshape(q.shape[1], q.shape[0])


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    scale: float,
    backend: Backend,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if backend == "math":
        return _math_backward(grad, q, k, v, out, lse, block.causal, scale, window)
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the dropout state, which no dropout reads
    if backend == "flash":
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad[None], q[None], k[None], v[None], out[None], lse[None].contiguous(), None, None,
            q.shape[0], k.shape[0], 0.0, block.causal, unused, unused[0], scale=scale,
            **_flash_window(block.causal, window),
        )  # fmt: skip
        return dq[0], dk[0], dv[0]
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        _heads_first(grad), _heads_first(q), _heads_first(k), _heads_first(v), _heads_first(out),
        lse.contiguous()[None, :, :, None], seed, seed, None, None, None,
        q.shape[0], k.shape[0], 0.0, block.causal, scale=scale,
    )  # fmt: skip
    return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _flash_window(causal: bool, window: int | None) -> dict[str, int]:
    return {"window_size_left": window - 1, "window_size_right": 0} if causal and window else {}


# ---- the plain definition, a few query rows at a time ----

_SCORES = 1 << 26  # scores held at once, in numbers


def _query_chunks(q: Tensor, k: Tensor) -> list[tuple[int, int]]:
    rows = max(1, _SCORES // max(1, q.shape[1] * k.shape[0]))
    return [(start, min(start + rows, q.shape[0])) for start in range(0, q.shape[0], rows)]


def _scores(q: Tensor, k: Tensor, start: int, causal: bool, scale: float, window: int | None) -> Tensor:
    """(kv_heads, heads a kv_head, rows, keys), -inf where a query may not look."""
    scores = torch.einsum("qgrd,kgd->grqk", q, k) * scale
    if causal:
        at = torch.arange(start, start + q.shape[0], device=q.device)[:, None]
        keys = torch.arange(k.shape[0], device=q.device)[None, :]
        hidden = keys > at
        if window:
            hidden = hidden | (keys <= at - window)
        scores = scores.masked_fill_(hidden, float("-inf"))
    return scores


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    split: Tensor = x.to(_wide(x.dtype)).unflatten(1, (kv_heads, -1))
    return split


def _math_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=_wide(q.dtype), device=q.device)
    kv_heads = k.shape[1]
    k, v = k.to(_wide(k.dtype)), v.to(_wide(v.dtype))
    for start, end in _query_chunks(q, k):
        keys = end if causal else k.shape[0]
        scores = _scores(_grouped(q[start:end], kv_heads), k[:keys], start, causal, scale, window)
        part = torch.logsumexp(scores, dim=-1)
        lse[:, start:end] = part.flatten(0, 1)
        weights = torch.exp(scores - part.unsqueeze(-1))
        out[start:end] = torch.einsum("grqk,kgd->qgrd", weights, v[:keys]).flatten(1, 2)
    return out, lse


def _math_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads, dtype = k.shape[1], q.dtype
    k, v = k.to(_wide(k.dtype)), v.to(_wide(v.dtype))
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for start, end in _query_chunks(q, k):
        keys = end if causal else k.shape[0]
        queries, grads = _grouped(q[start:end], kv_heads), _grouped(grad[start:end], kv_heads)
        scores = _scores(queries, k[:keys], start, causal, scale, window)
        weights = torch.exp(scores - lse[:, start:end].unflatten(0, (kv_heads, -1)).unsqueeze(-1))
        dv[:keys] += torch.einsum("grqk,qgrd->kgd", weights, grads)
        along = (grads * _grouped(out[start:end], kv_heads)).sum(-1).permute(1, 2, 0).unsqueeze(-1)
        d_scores = weights * (torch.einsum("qgrd,kgd->grqk", grads, v[:keys]) - along) * scale
        dq[start:end] = torch.einsum("grqk,kgd->qgrd", d_scores, k[:keys]).flatten(1, 2)
        dk[:keys] += torch.einsum("grqk,qgrd->kgd", d_scores, queries)
    return dq, dk.to(dtype), dv.to(dtype)
