"""Triton kernels behind `pointwise.py`: each reads its inputs once and writes its outputs once.

Imported only where Triton is. They need nothing newer than Ampere. Arithmetic is float32; what transformers rounds to
the tile's dtype between two steps is rounded here too.
Grids have one axis, since any other ends at 65,535 programs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(x, w, y, x_stride, y_stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    loaded = tl.load(x + row * x_stride + cols, mask=mask, other=0.0)
    wide = loaded.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(wide * wide, 0) / n + eps)
    normed = (wide * scale).to(loaded.dtype).to(tl.float32)
    weight = tl.load(w + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * y_stride + cols, (normed * weight).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _add_rms_norm_backward(dy, x, w, dx, dy_stride, x_stride, dx_stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    wide = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(wide * wide, 0) / n + eps)
    normed = wide * scale
    weight = tl.load(w + cols, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(dy + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32) * weight
    grad = scale * (grad - normed * (tl.sum(grad * normed, 0) / n))
    target = dx + row * dx_stride + cols
    before = tl.load(target, mask=mask, other=0.0)
    tl.store(target, (before.to(tl.float32) + grad).to(before.dtype), mask=mask)


@triton.jit
def _rotate(
    x, cos, sin, w, y, heads, tokens, x_token, x_head, y_token, y_head, table, half, eps,
    NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    head = place % heads
    rows = place // heads * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < tokens)[:, None] & (cols < half)[None, :]
    at = x + head * x_head + rows[:, None] * x_token + cols[None, :]
    first = tl.load(at, mask=mask, other=0.0)
    dtype = first.dtype
    first = first.to(tl.float32)
    second = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = 1 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * half) + eps)[:, None]
        w1 = tl.load(w + cols, mask=cols < half, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(w + half + cols, mask=cols < half, other=0.0).to(tl.float32)[None, :]
        first = ((first * scale).to(dtype).to(tl.float32) * w1).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * w2).to(dtype).to(tl.float32)
    angle = rows[:, None] * table + cols[None, :]
    c1 = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
    c2 = tl.load(cos + angle + half, mask=mask, other=0.0).to(tl.float32)
    s1 = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
    s2 = tl.load(sin + angle + half, mask=mask, other=0.0).to(tl.float32)
    to = y + head * y_head + rows[:, None] * y_token + cols[None, :]
    tl.store(to, (first * c1 - second * s1).to(y.dtype.element_ty), mask=mask)
    tl.store(to + half, (second * c2 + first * s2).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_backward(
    dy, x, cos, sin, w, heads, tokens, dy_token, dy_head, x_token, x_head, table, half, eps,
    NORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    head = place % heads
    rows = place // heads * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < tokens)[:, None] & (cols < half)[None, :]
    source = dy + head * dy_head + rows[:, None] * dy_token + cols[None, :]
    d1 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    d2 = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    angle = rows[:, None] * table + cols[None, :]
    c1 = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
    c2 = tl.load(cos + angle + half, mask=mask, other=0.0).to(tl.float32)
    s1 = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
    s2 = tl.load(sin + angle + half, mask=mask, other=0.0).to(tl.float32)
    g1 = d1 * c1 + d2 * s2
    g2 = d2 * c2 - d1 * s1
    at = x + head * x_head + rows[:, None] * x_token + cols[None, :]
    if NORM:
        x1 = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
        scale = 1 / tl.sqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * half) + eps)[:, None]
        w1 = tl.load(w + cols, mask=cols < half, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(w + half + cols, mask=cols < half, other=0.0).to(tl.float32)[None, :]
        x1 = x1 * scale
        x2 = x2 * scale
        g1 = g1 * w1
        g2 = g2 * w2
        along = ((tl.sum(g1 * x1, 1) + tl.sum(g2 * x2, 1)) / (2 * half))[:, None]
        g1 = scale * (g1 - x1 * along)
        g2 = scale * (g2 - x2 * along)
    tl.store(at, g1.to(x.dtype.element_ty), mask=mask)
    tl.store(at + half, g2.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu(gate, up, y, in_stride, y_stride, n, BLOCK: tl.constexpr):
    blocks = tl.cdiv(n, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    loaded = tl.load(gate + row * in_stride + cols, mask=mask, other=0.0)
    g = loaded.to(tl.float32)
    u = tl.load(up + row * in_stride + cols, mask=mask, other=0.0).to(tl.float32)
    silu = (g * tl.sigmoid(g)).to(loaded.dtype).to(tl.float32)
    tl.store(y + row * y_stride + cols, (silu * u).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward(dy, gate, up, y, dy_stride, in_stride, y_stride, n, BLOCK: tl.constexpr):
    blocks = tl.cdiv(n, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    loaded = tl.load(gate + row * in_stride + cols, mask=mask, other=0.0)
    g = loaded.to(tl.float32)
    u = tl.load(up + row * in_stride + cols, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(dy + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    silu = g * sigmoid
    rounded = silu.to(loaded.dtype).to(tl.float32)
    tl.store(y + row * y_stride + cols, (rounded * u).to(y.dtype.element_ty), mask=mask)
    d_gate = d * u * sigmoid * (1 + g * (1 - sigmoid))
    tl.store(up + row * in_stride + cols, (d * silu).to(loaded.dtype), mask=mask)
    tl.store(gate + row * in_stride + cols, d_gate.to(loaded.dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """See `pointwise.rms_norm`."""
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    _rms_norm[(x.shape[0],)](
        x, weight, out, x.stride(0), out.stride(0), width, eps, BLOCK=block, num_warps=_warps(block)
    )
    return out


def add_rms_norm_backward(grad_out: Tensor, x: Tensor, weight: Tensor, eps: float, grad_x: Tensor) -> None:
    """See `pointwise.add_rms_norm_backward`."""
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    strides = grad_out.stride(0), x.stride(0), grad_x.stride(0)
    _add_rms_norm_backward[(x.shape[0],)](
        grad_out, x, weight, grad_x, *strides, width, eps, BLOCK=block, num_warps=_warps(block)
    )


def rotate(raw: Tensor, cos: Tensor, sin: Tensor, norm: tuple[Tensor, float] | None, out: Tensor) -> Tensor:
    """See `pointwise.rotate`."""
    tokens, heads, width = raw.shape
    rows, block = 16, triton.next_power_of_2(width // 2)
    weight, eps = norm or (raw, 0.0)
    _rotate[(heads * triton.cdiv(tokens, rows),)](
        raw, cos, sin, weight, out, heads, tokens, raw.stride(0), raw.stride(1), out.stride(0), out.stride(1),
        cos.stride(0), width // 2, eps, NORM=norm is not None, ROWS=rows, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def rotate_backward(grad_out: Tensor, raw: Tensor, cos: Tensor, sin: Tensor, norm: tuple[Tensor, float] | None) -> None:
    """See `pointwise.rotate_backward`."""
    tokens, heads, width = raw.shape
    rows, block = 16, triton.next_power_of_2(width // 2)
    weight, eps = norm or (raw, 0.0)
    _rotate_backward[(heads * triton.cdiv(tokens, rows),)](
        grad_out, raw, cos, sin, weight, heads, tokens, grad_out.stride(0), grad_out.stride(1), raw.stride(0),
        raw.stride(1), cos.stride(0), width // 2, eps, NORM=norm is not None, ROWS=rows, BLOCK=block, num_warps=4,
    )  # fmt: skip


def swiglu(gate: Tensor, up: Tensor, out: Tensor) -> Tensor:
    """See `pointwise.swiglu`. gate and up share their row stride."""
    rows, width = gate.shape
    block = min(2048, triton.next_power_of_2(width))
    _swiglu[(rows * triton.cdiv(width, block),)](
        gate, up, out, gate.stride(0), out.stride(0), width, BLOCK=block, num_warps=4
    )
    return out


def swiglu_backward(grad_out: Tensor, gate: Tensor, up: Tensor, out: Tensor) -> None:
    """See `pointwise.swiglu_backward`. gate and up share their row stride."""
    rows, width = gate.shape
    block = min(2048, triton.next_power_of_2(width))
    strides = grad_out.stride(0), gate.stride(0), out.stride(0)
    _swiglu_backward[(rows * triton.cdiv(width, block),)](
        grad_out, gate, up, out, *strides, width, BLOCK=block, num_warps=4
    )


def _warps(block: int) -> int:
    return 16 if block >= 8192 else 8 if block >= 2048 else 4
