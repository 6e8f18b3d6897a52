"""Linear layers that share one input, with their LoRA adapters, as few large matrix products.

The weights W of the layers and the LoRA matrices A stand below each other in one matrix [W; A], so that x·[W; A]ᵀ gives
the output and the adapter's inner values at once, and the backward folds the adapter's input gradient into the base
product. The scaled LoRA matrices B form a block-diagonal matrix. 4-bit weights are dequantised when the matrix is
loaded: once a pass over the sequence, not once a tile.

    projection = Projection([q_proj, k_proj, v_proj])
    loaded = projection.load(workspace, "qkv", torch.bfloat16, grads)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from traceforge_core.errors import TraceForgeError
from traceforge_core.longcontext.workspace import Workspace

PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Adapter:
    """One LoRA pair on rows [start, end) of the output: adds scaling · x·Aᵀ·Bᵀ. down: A (r, in), up: B (out, r)."""

    start: int
    end: int
    down: nn.Parameter
    up: nn.Parameter
    scaling: float


class Projection:
    """The layers of `modules` (nn.Linear, bitsandbytes Linear4bit, or either under a peft LoRA layer), side by side."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self.bases: list[Any] = []
        self.adapters: list[Adapter] = []
        end = 0
        for module in modules:
            base = _base_layer(module)
            start, end = end, end + base.out_features
            self.bases.append(base)
            self.adapters += _adapters(module, start, end)
        self.inputs = self.bases[0].in_features
        self.outputs = end
        # Columns of the adapters' inner values; a multiple of 8 keeps every row aligned for the tensor cores.
        self.rank = -(-sum(adapter.down.shape[0] for adapter in self.adapters) // 8) * 8
        self.width = self.outputs + self.rank

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Trainable parameters, in the order in which `Loaded.gradients` gives their gradients."""
        both = [parameter for adapter in self.adapters for parameter in (adapter.down, adapter.up)]
        return [parameter for parameter in both if parameter.requires_grad]

    def load(self, workspace: Workspace, name: str, dtype: torch.dtype, grads: dict[int, Tensor] | None) -> Loaded:
        """The matrices in `dtype`, in buffers of the workspace. `grads`: where `finish` adds gradients, by id."""
        matrix = workspace.get(f"{name}.matrix", (self.width, self.inputs), dtype)
        row = 0
        biases = []
        for base in self.bases:
            _write_weight(base, matrix[row : row + base.out_features])
            row += base.out_features
            biases.append(base.bias)
        up = None
        if self.rank:
            up = workspace.get(f"{name}.up", (self.outputs, self.rank), dtype).zero_()
            column = 0
            for adapter in self.adapters:
                rank = adapter.down.shape[0]
                matrix[row : row + rank] = adapter.down.detach()
                up[adapter.start : adapter.end, column : column + rank] = adapter.up.detach() * adapter.scaling
                row, column = row + rank, column + rank
            matrix[row:].zero_()
        bias = None
        if any(bias is not None for bias in biases):
            parts = [
                torch.zeros(base.out_features, device=matrix.device, dtype=dtype) if bias is None else bias.to(dtype)
                for base, bias in zip(self.bases, biases, strict=True)
            ]
            bias = torch.cat(parts)
        return Loaded(self, matrix, up, bias, grads)


class Loaded:
    """A projection whose matrices are in device memory, for one pass over the tiles."""

    def __init__(
        self,
        projection: Projection,
        matrix: Tensor,
        up: Tensor | None,
        bias: Tensor | None,
        grads: dict[int, Tensor] | None,
    ) -> None:
        self.projection, self.matrix, self.up, self.bias, self.grads = projection, matrix, up, bias, grads
        self.outputs = projection.outputs
        self.grad_down: Tensor | None = None
        self.grad_up: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Writes y (tile, width): the output in the first `outputs` columns, the adapters' inner values behind it."""
        torch.mm(x, self.matrix.t(), out=y)
        output = y[:, : self.outputs]
        if self.up is not None:
            output.addmm_(y[:, self.outputs :], self.up.t())
        if self.bias is not None:
            output += self.bias
        return output

    def inner(self, x: Tensor) -> Tensor | None:
        """The adapters' inner values (tile, rank) alone, where the output is not needed."""
        return x @ self.matrix[self.outputs :].t() if self.up is not None else None

    def backward_input(self, grad: Tensor, grad_x: Tensor | None) -> None:
        """grad (tile, width): the output's gradient in its first columns; the rest becomes that of the inner values.

        Writes the input's gradient into grad_x (tile, in) where that is given.
        """
        if self.up is not None:
            grad[:, self.outputs :] = grad[:, : self.outputs] @ self.up
        if grad_x is not None:
            torch.mm(grad, self.matrix, out=grad_x)

    def backward_adapters(self, grad: Tensor, x: Tensor, inner: Tensor | None) -> None:
        """Adds the adapters' gradients up; grad as `backward_input` left it, x (tile, in), inner (tile, rank)."""
        if inner is not None and self.projection.parameters:
            self.grad_up = _accumulate(self.grad_up, grad[:, : self.outputs].t(), inner)
            self.grad_down = _accumulate(self.grad_down, grad[:, self.outputs :].t(), x)

    def backward(self, grad: Tensor, x: Tensor, inner: Tensor | None, grad_x: Tensor | None) -> None:
        """Both of the above."""
        self.backward_input(grad, grad_x)
        self.backward_adapters(grad, x, inner)

    def finish(self) -> None:
        """Hand each adapter's gradient over, at least float32, once all tiles are done."""
        if self.grads is None or self.grad_up is None or self.grad_down is None:
            return
        column = 0
        for adapter in self.projection.adapters:
            columns = slice(column, column + adapter.down.shape[0])
            column = columns.stop
            if adapter.down.requires_grad:
                _add(self.grads, adapter.down, self.grad_down[columns])
            if adapter.up.requires_grad:
                _add(self.grads, adapter.up, self.grad_up[adapter.start : adapter.end, columns] * adapter.scaling)
        self.grad_up = self.grad_down = None


def _add(grads: dict[int, Tensor], parameter: nn.Parameter, grad: Tensor) -> None:
    before = grads.get(id(parameter))
    grads[id(parameter)] = grad.clone() if before is None else before + grad


def _accumulate(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left · right, accumulated in float32 (float64 for float64) whatever the tile's dtype."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if left.is_cuda and left.dtype != wide:
        product = torch.mm(left, right, out_dtype=wide)
    else:
        product = left.to(wide) @ right.to(wide)
    return product if total is None else total.add_(product)


def _base_layer(module: Any) -> Any:
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def _adapters(module: Any, start: int, end: int) -> list[Adapter]:
    if not hasattr(module, "lora_A") or module.disable_adapters or module.merged:
        return []
    adapters = []
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        dropout = module.lora_dropout[name]
        if dropout.training and getattr(dropout, "p", 0.0):
            raise TraceForgeError(f"Tiled layers need LoRA dropout off; adapter {name!r} has {dropout.p}. Set it to 0.")
        if name in getattr(module, "lora_variant", {}) or getattr(module, "fan_in_fan_out", False):
            raise TraceForgeError(
                f"Tiled layers know plain LoRA only; adapter {name!r} is a variant of it (DoRA or the like). "
                "Use plain LoRA, or set long_context to off."
            )
        if module.lora_B[name].bias is not None:
            raise TraceForgeError(f"Adapter {name!r} has a LoRA bias; set lora_bias to false or long_context to off.")
        adapters.append(
            Adapter(start, end, module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name])
        )
    return adapters


def check_module(module: Any, name: str) -> None:
    """Raise TraceForgeError where a projection is of a kind that `Projection` cannot load: its base layer's or its
    adapter's."""
    base = _base_layer(module)
    weight = getattr(base, "weight", None)
    if not isinstance(weight, Tensor) or not hasattr(base, "in_features"):
        raise TraceForgeError(f"Tiled layers cannot use {name}: {type(base).__name__} is not a linear layer.")
    # 8-bit floating point weights have scales beside them.
    if getattr(weight, "quant_state", None) is None and weight.dtype not in PLAIN:
        raise TraceForgeError(
            f"Tiled layers cannot use {name}: its weights are {weight.dtype} ({type(base).__name__}). "
            "Load the model in NF4, bf16 or float32, or set long_context to off."
        )
    if base is not module and not _is_lora(module):
        raise TraceForgeError(
            f"Tiled layers know plain LoRA only; {name} has an adapter of another kind ({type(module).__module__}). "
            "Use LoRA, or set long_context to off."
        )
    _adapters(module, 0, base.out_features)


def _is_lora(module: Any) -> bool:
    """Whether this is PEFT's LoRA: A and B are layers by the adapter's name, as in no other adapter."""
    return all(isinstance(getattr(module, name, None), nn.ModuleDict) for name in ("lora_A", "lora_B", "lora_dropout"))


def _write_weight(base: Any, target: Tensor) -> None:
    weight = base.weight
    state = getattr(weight, "quant_state", None)
    if state is None:
        target.copy_(weight.detach())
        return
    from bitsandbytes.functional import dequantize_4bit

    if target.is_cuda and target.dtype == state.dtype:
        dequantize_4bit(weight.data, state, out=target)
    else:
        target.copy_(dequantize_4bit(weight.data, state))
