"""One decoder layer, forward and backward, tile by tile: only attention sees the whole sequence at once.

The layer is x + o(attend(rotate(qkv(norm(x))))) =: h, then h + down(silu(gate(norm(h))) · up(norm(h))), as in Llama,
Mistral, Qwen2 and Qwen3. `forward` overwrites x with the layer's output. `backward` is given the layer's input again,
recomputes what it needs and overwrites the output's gradient with the input's. Nothing of the size (tokens × MLP width)
ever exists; per token there are, in units of one hidden state, the residual, its gradient, q with k and v, the
attention's output and its gradient, and a share of the last three for the heads in work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from traceforge_core.longcontext import pointwise
from traceforge_core.longcontext.attention import Backend, Block, attend, attend_backward
from traceforge_core.longcontext.projection import Loaded, Projection
from traceforge_core.longcontext.workspace import Workspace


@dataclass(slots=True)
class Pass:
    """What all layers of one pass over a flat sequence share.

    cos, sin: (tokens, head_dim). tile: rows worked on at once. groups: parts in which the KV heads are attended to;
    each layer takes the largest count that divides its heads. grads: adapter gradients by id of the parameter.
    """

    blocks: Sequence[Block]
    cos: Tensor
    sin: Tensor
    tile: int
    groups: int
    dtype: torch.dtype
    workspace: Workspace
    grads: dict[int, Tensor] = field(default_factory=dict)

    def tiles(self, tokens: int) -> Iterator[tuple[int, int]]:
        for start in range(0, tokens, self.tile):
            yield start, min(start + self.tile, tokens)


class TiledLayer:
    """A view of one decoder layer of a loaded model; it owns no weights. Cheap to make, made anew each pass."""

    def __init__(self, layer: Any, backend: Backend) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = Projection([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o = Projection([attention.o_proj])
        self.gate_up = Projection([mlp.gate_proj, mlp.up_proj])
        self.down = Projection([mlp.down_proj])
        self.norm1, self.norm2 = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.q_norm = _norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.k_norm = _norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.head_dim = attention.head_dim
        self.heads = self.o.inputs // self.head_dim
        self.kv_heads = (self.qkv.outputs - self.o.inputs) // (2 * self.head_dim)
        self.scale = attention.scaling
        self.window = window_of(attention)
        self.backend = backend
        self.hidden, self.mlp_width = self.qkv.inputs, self.down.inputs

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for part in (self.qkv, self.o, self.gate_up, self.down) for p in part.parameters]

    # ---- forward ----

    def forward(self, x: Tensor, run: Pass, attended: Callable[[Tensor, Tensor], None]) -> None:
        """Overwrites x (tokens, hidden) with the layer's output.

        attended is called once, with the attention's output (tokens, q width) and log-sum-exp (heads, tokens) and
        before the first row of x changes.
        """
        self._raw_qkv(x, run)
        out, lse = self._attend(x.shape[0], run)
        attended(out, lse)
        o, gate_up, down = (self._load(name, run, None) for name in ("o", "gate_up", "down"))
        width = max(self.o.width, self.down.width)
        for start, end in run.tiles(x.shape[0]):
            residual, rows = x[start:end], end - start
            y = run.workspace.get("y", (rows, width), run.dtype)
            residual += o.forward(out[start:end], y[:, : self.o.width])
            self._gate_up(residual, gate_up, run)
            act = run.workspace.get("act", (rows, self.mlp_width), run.dtype)
            gate, up = self._gate_and_up(rows, run)
            pointwise.swiglu(gate, up, act)
            residual += down.forward(act, y[:, : self.down.width])

    def _raw_qkv(self, x: Tensor, run: Pass) -> Tensor:
        """q, k and v of all tokens before norm and rotation, (tokens, qkv width)."""
        raw = run.workspace.get("qkv", (x.shape[0], self.qkv.width), run.dtype)
        qkv = self._load("qkv", run, None)
        for start, end in run.tiles(x.shape[0]):
            normed = run.workspace.get("normed", (end - start, self.hidden), run.dtype)
            pointwise.rms_norm(x[start:end], *self.norm1, normed)
            qkv.forward(normed, raw[start:end])
        return raw

    def _attend(self, tokens: int, run: Pass) -> tuple[Tensor, Tensor]:
        raw = run.workspace.get("qkv", (tokens, self.qkv.width), run.dtype)
        flat, lse = self.attention_buffers(tokens, run)
        out = flat.unflatten(1, (self.heads, self.head_dim))
        for q_heads, kv_heads in self._groups(run.groups):
            q, k, v = self._rotated(raw, q_heads, kv_heads, run)
            _, lse[q_heads] = attend(q, k, v, run.blocks, self.scale, self.backend, self.window, out=out[:, q_heads])
            del q, k, v
        return flat, lse

    def reserve(self, tokens: int, run: Pass) -> None:
        """Take the backward's large buffers before the small ones, which then do not lie between them."""
        for name, width in (("qkv", self.qkv.width), ("out", self.o.inputs), ("grad_out", self.o.inputs)):
            run.workspace.get(name, (tokens, width), run.dtype)

    def attention_buffers(self, tokens: int, run: Pass) -> tuple[Tensor, Tensor]:
        """Where the attention's output (tokens, q width) and log-sum-exp (heads, tokens) lie in the workspace."""
        wide = torch.promote_types(run.dtype, torch.float32)
        out = run.workspace.get("out", (tokens, self.heads * self.head_dim), run.dtype)
        return out, run.workspace.get("lse", (self.heads, tokens), wide)

    def _groups(self, wanted: int) -> list[tuple[slice, slice]]:
        groups = max(count for count in range(1, min(wanted, self.kv_heads) + 1) if self.kv_heads % count == 0)
        q, kv = self.heads // groups, self.kv_heads // groups
        return [(slice(i * q, (i + 1) * q), slice(i * kv, (i + 1) * kv)) for i in range(groups)]

    def _raw_heads(self, raw: Tensor, q_heads: slice, kv_heads: slice) -> tuple[Tensor, Tensor, Tensor]:
        q_end = self.heads * self.head_dim
        k_end = q_end + self.kv_heads * self.head_dim
        v_end = k_end + self.kv_heads * self.head_dim
        q = raw[:, :q_end].unflatten(1, (-1, self.head_dim))[:, q_heads]
        k = raw[:, q_end:k_end].unflatten(1, (-1, self.head_dim))[:, kv_heads]
        v = raw[:, k_end:v_end].unflatten(1, (-1, self.head_dim))[:, kv_heads]
        return q, k, v

    def _rotated(self, raw: Tensor, q_heads: slice, kv_heads: slice, run: Pass) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._raw_heads(raw, q_heads, kv_heads)
        rotated_q = run.workspace.get("q", tuple(q.shape), run.dtype)
        rotated_k = run.workspace.get("k", tuple(k.shape), run.dtype)
        pointwise.rotate(q, run.cos, run.sin, self.q_norm, rotated_q)
        pointwise.rotate(k, run.cos, run.sin, self.k_norm, rotated_k)
        return rotated_q, rotated_k, v

    def _gate_up(self, residual: Tensor, gate_up: Loaded, run: Pass) -> Tensor:
        normed = run.workspace.get("normed", (residual.shape[0], self.hidden), run.dtype)
        pointwise.rms_norm(residual, *self.norm2, normed)
        gate_up.forward(normed, run.workspace.get("gate_up", (residual.shape[0], self.gate_up.width), run.dtype))
        return normed

    def _gate_and_up(self, rows: int, run: Pass) -> tuple[Tensor, Tensor]:
        both = run.workspace.get("gate_up", (rows, self.gate_up.width), run.dtype)
        return both[:, : self.mlp_width], both[:, self.mlp_width : 2 * self.mlp_width]

    # ---- backward ----

    def backward(
        self,
        x: Tensor,
        grad: Tensor,
        run: Pass,
        attended: tuple[Tensor, Tensor] | None,
        after_tile: Callable[[int, int], None],
        input_gradient: bool = True,
    ) -> None:
        """Overwrites grad, the gradient of the layer's output (tokens, hidden), with that of its input x.

        attended: the attention's output and log-sum-exp where they were kept; else they are recomputed. after_tile is
        called when rows [start, end) of x are no longer needed. input_gradient False: grad ends as garbage (the first
        layer of a model with frozen embeddings).
        """
        tokens = x.shape[0]
        raw = self._raw_qkv(x, run)
        out, lse = self._attend(tokens, run) if attended is None else attended
        grad_out = self._backward_after_attention(x, grad, out, run)
        self._backward_attention(raw, out, lse, grad_out, run)
        self._backward_before_attention(x, grad, raw, run, after_tile, input_gradient)

    def _backward_after_attention(self, x: Tensor, grad: Tensor, out: Tensor, run: Pass) -> Tensor:
        o, gate_up, down = (self._load(name, run, run.grads) for name in ("o", "gate_up", "down"))
        grad_out = run.workspace.get("grad_out", tuple(out.shape), run.dtype)
        width = max(self.o.width, self.down.width)
        for start, end in run.tiles(x.shape[0]):
            rows = end - start
            y = run.workspace.get("y", (rows, width), run.dtype)
            middle = run.workspace.get("middle", (rows, self.hidden), x.dtype)
            torch.add(x[start:end], o.forward(out[start:end], y[:, : self.o.width]), out=middle)
            o_inner = y[:, self.o.outputs : self.o.width].clone() if self.o.rank else None
            normed = self._gate_up(middle, gate_up, run)
            gate, up = self._gate_and_up(rows, run)

            grad_rows = grad[start:end]
            wide_grad = y[:, : self.down.width]
            wide_grad[:, : self.hidden] = grad_rows
            act = run.workspace.get("act", (rows, self.mlp_width), run.dtype)
            grad_act = run.workspace.get("grad_act", (rows, self.mlp_width), run.dtype)
            # act, which the adapter of `down` needs, is recomputed together with the derivative of SwiGLU.
            down.backward_input(wide_grad, grad_act)
            both = run.workspace.get("gate_up", (rows, self.gate_up.width), run.dtype)
            gate_up_inner = both[:, self.gate_up.outputs :].clone() if self.gate_up.rank else None
            pointwise.swiglu_backward(grad_act, gate, up, act)
            down.backward_adapters(wide_grad, act, down.inner(act))
            grad_normed = run.workspace.get("grad_normed", (rows, self.hidden), run.dtype)
            gate_up.backward(both, normed, gate_up_inner, grad_normed)
            pointwise.add_rms_norm_backward(grad_normed, middle, *self.norm2, grad_rows)

            wide_grad = y[:, : self.o.width]
            wide_grad[:, : self.hidden] = grad_rows
            o.backward(wide_grad, out[start:end], o_inner, grad_out[start:end])
        for loaded in (o, gate_up, down):
            loaded.finish()
        return grad_out

    def _backward_attention(self, raw: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, run: Pass) -> None:
        """Overwrites the raw q, k and v with their gradients, group by group."""
        out, grad_out = (x.unflatten(1, (-1, self.head_dim)) for x in (out, grad_out))
        for q_heads, kv_heads in self._groups(run.groups):
            q, k, v = self._rotated(raw, q_heads, kv_heads, run)
            dq, dk, dv = attend_backward(
                grad_out[:, q_heads], q, k, v, out[:, q_heads], lse[q_heads],
                run.blocks, self.scale, self.backend, self.window,
            )  # fmt: skip
            raw_q, raw_k, raw_v = self._raw_heads(raw, q_heads, kv_heads)
            pointwise.rotate_backward(dq, raw_q, run.cos, run.sin, self.q_norm)
            pointwise.rotate_backward(dk, raw_k, run.cos, run.sin, self.k_norm)
            raw_v.copy_(dv)
            del q, k, v, dq, dk, dv

    def _backward_before_attention(
        self,
        x: Tensor,
        grad: Tensor,
        raw: Tensor,
        run: Pass,
        after_tile: Callable[[int, int], None],
        input_gradient: bool,
    ) -> None:
        qkv = self._load("qkv", run, run.grads)
        for start, end in run.tiles(x.shape[0]):
            rows = end - start
            normed = run.workspace.get("normed", (rows, self.hidden), run.dtype)
            pointwise.rms_norm(x[start:end], *self.norm1, normed)
            inner = raw[start:end, self.qkv.outputs :].clone() if self.qkv.rank else None
            grad_normed = run.workspace.get("grad_normed", (rows, self.hidden), run.dtype)
            qkv.backward(raw[start:end], normed, inner, grad_normed if input_gradient else None)
            if input_gradient:
                pointwise.add_rms_norm_backward(grad_normed, x[start:end], *self.norm1, grad[start:end])
            after_tile(start, end)
        qkv.finish()

    def _load(self, name: str, run: Pass, grads: dict[int, Tensor] | None) -> Loaded:
        loaded: Loaded = getattr(self, name).load(run.workspace, name, run.dtype, grads)
        return loaded


def window_of(attention: Any) -> int | None:
    """Keys that a query of this attention module may see, itself included; None: all before it."""
    if attention.config.model_type == "mistral":
        window: int | None = attention.config.sliding_window
        return window
    # Not the configuration's: a window left over in a llama's means nothing.
    return getattr(attention, "sliding_window", None)


def _norm(module: Any) -> tuple[Tensor, float]:
    return module.weight.detach(), module.variance_epsilon
