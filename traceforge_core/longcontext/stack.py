"""All decoder layers and the final norm of a model as one differentiable function of the embeddings.

    hidden = run_stack(decoder, x, positions, blocks, settings, keep=rows)

The residual stream is one buffer that every layer overwrites; each layer's input is parked in host memory on the way
up and comes back, rows at a time, behind the layer that has just used the buffer on the way down. The gradient that
enters is that of the kept rows alone. Nothing is kept between passes but the pool of pinned blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from traceforge_core.config import LongContextConfig
from traceforge_core.longcontext import pointwise
from traceforge_core.longcontext.attention import Block, choose_backend
from traceforge_core.longcontext.host_store import HostStore
from traceforge_core.longcontext.tiled_layer import Pass, TiledLayer, window_of
from traceforge_core.longcontext.tiling import choose_tiling
from traceforge_core.longcontext.workspace import Workspace

_LARGE = 1 << 28  # numbers in a hidden state from which the backward begins with an empty cache


@dataclass(slots=True)
class _Plan:
    """What one call of the stack works with; the tensors in it need no gradient."""

    decoder: Any
    layers: list[TiledLayer]
    blocks: Sequence[Block]
    cos: Tensor
    sin: Tensor
    keep: Tensor | None
    dtype: torch.dtype
    tile: int
    groups: int
    keep_attention: bool
    on_device: int

    def start(self, device: torch.device) -> Pass:
        workspace = Workspace(device)
        return Pass(self.blocks, self.cos, self.sin, self.tile, self.groups, self.dtype, workspace)


def run_stack(
    decoder: Any,
    x: Tensor,
    positions: Tensor,
    blocks: Sequence[Block],
    settings: LongContextConfig,
    keep: Tensor | None = None,
) -> Tensor:
    """Hidden states after the final norm, (rows, hidden): of the rows `keep`, which may repeat, or of all.

    decoder: the base model (embed_tokens, layers, norm, rotary_emb). x: embeddings of a flat sequence, (tokens,
    hidden); they are overwritten. positions: (tokens,), the position ids. blocks: who attends to whom.
    """
    if x.is_leaf:
        # Gradient checkpointing asks for the gradient of frozen embeddings; kept for it, they would take up the GPU
        # until the end of the backward.
        x = x.detach()
    attention = decoder.layers[0].self_attn
    dtype = _compute_dtype(attention.q_proj, x)
    layers = [
        TiledLayer(layer, choose_backend(x.device, dtype, attention.head_dim, window_of(layer.self_attn)))
        for layer in decoder.layers
    ]
    with torch.no_grad():
        cos, sin = decoder.rotary_emb(x, positions[None])
    tile, groups = choose_tiling(decoder.config, x.shape[0], x.device, dtype, settings, len(blocks))
    plan = _Plan(
        decoder, layers, blocks, cos[0], sin[0], keep, dtype, tile, groups,
        settings.recompute == "none", settings.inputs_on_device,
    )  # fmt: skip
    parameters: list[nn.Parameter] = []
    for layer in layers:
        known = {id(parameter) for parameter in parameters}
        parameters += [parameter for parameter in layer.parameters if id(parameter) not in known]
    hidden: Tensor = _Stack.apply(x, plan, *parameters)  # type: ignore[no-untyped-call]
    return hidden


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Plan, *parameters: nn.Parameter) -> Tensor:
        differentiate = any(ctx.needs_input_grad)
        store = HostStore(x.device)
        stream = x.detach()
        with torch.autocast(x.device.type, enabled=False):
            run = plan.start(x.device)
            for number, layer in enumerate(plan.layers):
                if differentiate:
                    store.save(f"input {number}", stream, on_device=number < plan.on_device)

                def attended(out: Tensor, lse: Tensor, number: int = number) -> None:
                    store.wait_saved()
                    if differentiate and plan.keep_attention:
                        store.save(f"out {number}", out)
                        store.save(f"lse {number}", lse)

                layer.forward(stream, run, attended)
                store.wait_saved()
            del run
            kept = stream if plan.keep is None else stream[plan.keep]
            weight, eps = _final_norm(plan.decoder)
            result = torch.empty(kept.shape, dtype=torch.promote_types(weight.dtype, x.dtype), device=x.device)
            pointwise.rms_norm(kept, weight, eps, result)
        if differentiate:
            if plan.keep is None:
                store.save("kept", kept)
                store.wait_saved()
            ctx.kept = None if plan.keep is None else kept
            ctx.shape, ctx.residual_dtype = x.shape, x.dtype
            ctx.store, ctx.plan, ctx.parameters = store, plan, parameters
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        store: HostStore | None = ctx.store
        if store is None:
            raise RuntimeError("The tiled layers' parked inputs are used up: backward runs once for each forward.")
        plan: _Plan = ctx.plan
        grad_kept = grads[0]
        device, tokens = grad_kept.device, ctx.shape[0]
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            if device.type == "cuda" and ctx.shape.numel() >= _LARGE:
                # What the forward left cached is cut into pieces; buffers of GiBs would not find room among them.
                torch.cuda.empty_cache()
            stream = torch.empty(ctx.shape, dtype=ctx.residual_dtype, device=device)
            grad = _gradient_of_last_layer(ctx, stream, grad_kept)
            del grad_kept, grads
            run = plan.start(device)
            last = len(plan.layers) - 1
            plan.layers[last].reserve(tokens, run)
            store.load_rows(f"input {last}", stream, 0, tokens)
            out, lse = plan.layers[last].attention_buffers(tokens, run)
            if plan.keep_attention:
                store.load_rows(f"out {last}", out, 0, tokens)
                store.load_rows(f"lse {last}", lse, 0, lse.shape[0])
            for number in range(last, -1, -1):
                store.wait_loaded()

                def refill(start: int, end: int, number: int = number) -> None:
                    """Rows that this layer is done with: bring the layer below's in."""
                    if number == 0:
                        return
                    store.load_rows(f"input {number - 1}", stream, start, end)
                    if plan.keep_attention:
                        store.load_rows(f"out {number - 1}", out, start, end)
                        if end == tokens:
                            store.load_rows(f"lse {number - 1}", lse, 0, lse.shape[0])

                plan.layers[number].backward(
                    stream,
                    grad,
                    run,
                    (out, lse) if plan.keep_attention else None,
                    refill,
                    input_gradient=number > 0 or ctx.needs_input_grad[0],
                )
                for name in ("input", "out", "lse"):
                    store.drop(f"{name} {number}")
            store.wait_loaded()
            store.release()
            ctx.store = None
            results = [
                run.grads[id(p)].to(p.dtype) if needed else None
                for p, needed in zip(ctx.parameters, ctx.needs_input_grad[2:], strict=True)
            ]
        return grad if ctx.needs_input_grad[0] else None, None, *results


def _gradient_of_last_layer(ctx: Any, stream: Tensor, grad_kept: Tensor) -> Tensor:
    """The gradient of the last layer's output, (tokens, hidden), from that of the normed kept rows."""
    weight, eps = _final_norm(ctx.plan.decoder)
    grad = torch.zeros(ctx.shape, dtype=ctx.residual_dtype, device=stream.device)
    if ctx.kept is None:
        ctx.store.load_rows("kept", stream, 0, ctx.shape[0])
        ctx.store.wait_loaded()
        ctx.store.drop("kept")
        pointwise.add_rms_norm_backward(grad_kept.contiguous(), stream, weight, eps, grad)
        return grad
    # A row kept twice gets both gradients: sum them in float32, in whose precision single rows are cheap.
    wide = torch.promote_types(ctx.residual_dtype, torch.float32)
    rows = torch.zeros(grad_kept.shape, dtype=wide, device=stream.device)
    pointwise.add_rms_norm_backward(grad_kept.contiguous(), ctx.kept, weight, eps, rows)
    unique, where = torch.unique(ctx.plan.keep, return_inverse=True)
    summed = torch.zeros((unique.shape[0], rows.shape[1]), dtype=wide, device=rows.device).index_add_(0, where, rows)
    grad[unique] = summed.to(grad.dtype)
    ctx.kept = None
    return grad


def _final_norm(decoder: Any) -> tuple[Tensor, float]:
    return decoder.norm.weight.detach(), decoder.norm.variance_epsilon


def _compute_dtype(projection: Any, x: Tensor) -> torch.dtype:
    """What the matrix products are computed in: autocast's dtype, else the 4-bit layer's, else the weights'."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    base = projection.get_base_layer() if hasattr(projection, "get_base_layer") else projection
    if getattr(base.weight, "quant_state", None) is not None:
        return base.compute_dtype or x.dtype
    dtype: torch.dtype = base.weight.dtype
    return dtype
