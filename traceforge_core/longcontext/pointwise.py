"""The row-wise parts of a decoder layer and their derivatives: RMSNorm, rotary embedding, SwiGLU.

Each function works on a tile of rows. Plain torch defines what is computed; on CUDA, where Triton is installed, the
fused kernels of `kernels.py` compute the same with one pass over memory. Sums are taken in float32, or in float64
where the tile is float64.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None


def _fused(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and _triton_installed()


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """out = weight · x / sqrt(mean(x²) + eps), row by row; x and out (rows, width), rounded as transformers does."""
    if _fused(x):
        from traceforge_core.longcontext import kernels

        return kernels.rms_norm(x, weight, eps, out)
    wide = _wide(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return out.copy_(weight * normed.to(x.dtype))


def add_rms_norm_backward(grad_out: Tensor, x: Tensor, weight: Tensor, eps: float, grad_x: Tensor) -> None:
    """grad_x += derivative of `rms_norm` with respect to x (the weight is frozen)."""
    if _fused(x):
        from traceforge_core.longcontext import kernels

        kernels.add_rms_norm_backward(grad_out, x, weight, eps, grad_x)
        return
    grad_x += _rms_norm_backward(_wide(grad_out), _wide(x), weight, eps).to(grad_x.dtype)


def _rms_norm_backward(grad_out: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed = x * scale
    grad_normed = grad_out * weight
    return scale * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))


def rotate(
    raw: Tensor, cos: Tensor, sin: Tensor, norm: tuple[Tensor, float] | None, out: Tensor | None = None
) -> Tensor:
    """Heads after the optional per-head RMSNorm (weight, eps) and the rotary embedding.

    raw: (tokens, heads, head_dim), any strides. cos, sin: (tokens, head_dim). Returns (tokens, heads, head_dim).
    """
    out = torch.empty(raw.shape, dtype=raw.dtype, device=raw.device) if out is None else out
    if _fused(raw):
        from traceforge_core.longcontext import kernels

        return kernels.rotate(raw, cos, sin, norm, out)
    heads = raw
    if norm is not None:
        heads = rms_norm(raw, norm[0], norm[1], torch.empty_like(out))
    half = raw.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return out.copy_(heads * cos[:, None] + turned * sin[:, None])


def rotate_backward(grad_out: Tensor, raw: Tensor, cos: Tensor, sin: Tensor, norm: tuple[Tensor, float] | None) -> None:
    """Overwrites raw with the derivative of `rotate` with respect to it. Shapes as in `rotate`."""
    if _fused(raw):
        from traceforge_core.longcontext import kernels

        kernels.rotate_backward(grad_out, raw, cos, sin, norm)
        return
    half = raw.shape[-1] // 2
    turned = _wide(grad_out) * sin[:, None]
    grad = _wide(grad_out) * cos[:, None] + torch.cat((turned[..., half:], -turned[..., :half]), dim=-1)
    if norm is not None:
        grad = _rms_norm_backward(grad, _wide(raw), norm[0], norm[1])
    raw.copy_(grad)


def swiglu(gate: Tensor, up: Tensor, out: Tensor) -> Tensor:
    """out = silu(gate) · up, each (rows, width)."""
    if _fused(gate):
        from traceforge_core.longcontext import kernels

        return kernels.swiglu(gate, up, out)
    return torch.mul(torch.nn.functional.silu(gate), up, out=out)


def swiglu_backward(grad_out: Tensor, gate: Tensor, up: Tensor, out: Tensor) -> None:
    """Recomputes out = silu(gate) · up, then overwrites gate and up with their derivatives."""
    if _fused(gate):
        from traceforge_core.longcontext import kernels

        kernels.swiglu_backward(grad_out, gate, up, out)
        return
    swiglu(gate, up, out)
    wide_gate, wide_grad = _wide(gate), _wide(grad_out)
    sigmoid = torch.sigmoid(wide_gate)
    grad_gate = wide_grad * _wide(up) * sigmoid * (1 + wide_gate * (1 - sigmoid))
    up.copy_(wide_grad * wide_gate * sigmoid)
    gate.copy_(grad_gate)
