"""What one forward and backward costs: GPU memory by part, host memory, seconds.

    estimate = estimate_work(dims, Work("shared_prefix", prompt=77_824, completion=4_096), Setup(gpu_gib=24))

Memory follows from the buffers that `tiled_layer.py` uses (`memory.py` has the formulas); the kernels' scratch and the
device rates were measured on one H200 with cuDNN attention (benchmarks/long_context.py). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from traceforge_core.longcontext.memory import (
    GRAD_BYTES,
    MARGIN,
    NF4_BYTES,
    RANK,
    SCRATCH,
    TILES,
    Dimensions,
    choose_tiles,
    sequence_bytes,
    tile_bytes,
)

GIB = 2**30
USABLE = 0.92  # of a GPU's memory; the rest goes to the CUDA context, NCCL's channels and the allocator's fragmentation
Kind = Literal["sft", "branch_parallel", "shared_prefix"]


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does a second, as measured: bf16 products, causal attention forward and backward (operations that
    are not masked away), and bytes of device memory."""

    name: str
    product: float
    attention_forward: float
    attention_backward: float
    memory: float

    @classmethod
    def of(cls, device_name: str) -> Rates | None:
        """Measured rates of this device; None where it was never measured."""
        return next((rates for rates in RATES if rates.name in device_name), None)


RATES = (Rates("H200", product=640e12, attention_forward=560e12, attention_backward=510e12, memory=4.0e12),)


@dataclass(frozen=True, slots=True)
class Work:
    """One forward and backward on one GPU: a sample (completion counted in the loss), a branch, or a whole pair."""

    kind: Kind
    prompt: int
    completion: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.completion * (2 if self.kind == "shared_prefix" else 1)

    @property
    def kept(self) -> int:
        """Positions whose logits are computed."""
        return self.completion * (2 if self.kind == "shared_prefix" else 1)

    @property
    def seen_keys(self) -> float:
        """Pairs of query and key that are computed."""
        branch = (self.prompt + self.completion) ** 2 / 2
        if self.kind != "shared_prefix":
            return branch
        return branch + self.completion * self.prompt + self.completion**2 / 2


@dataclass(frozen=True, slots=True)
class Setup:
    """The machine and the settings that matter. weight_bytes: a number of a base layer. targets: LoRA's, None: all.
    tile, groups: None for what the layers choose on a GPU of this size. accumulation: forward passes of a worker an
    optimizer step. transport: what carries gradients between workers; None for a worker by itself."""

    gpu_gib: float
    host_gib: float | None = None
    weight_bytes: float = NF4_BYTES
    width: int = 2
    rank: int = 16
    targets: tuple[str, ...] | None = None
    optimizer_bytes: float = 8
    accumulation: int = 1
    replicas: int = 1
    transport: Literal["nccl", "gloo"] | None = None
    tile: int | None = None
    groups: int | None = None
    recompute: Literal["attention", "none"] = "attention"
    inputs_on_device: int = 0
    chunk: int = 1024
    rates: Rates | None = RATES[0]


@dataclass(frozen=True, slots=True)
class Estimate:
    """parts: peak GPU memory by part, in bytes. host: pinned memory, bytes. seconds: of one forward and backward."""

    work: Work
    parts: dict[str, float]
    host: float
    seconds: float | None

    @property
    def peak(self) -> float:
        return sum(self.parts.values())

    def fits(self, setup: Setup) -> bool:
        enough = setup.host_gib is None or self.host <= setup.host_gib * GIB
        return self.peak <= USABLE * setup.gpu_gib * GIB and enough


def estimate_work(dims: Dimensions, work: Work, setup: Setup) -> Estimate:
    """Peak memory by part, host memory and time of one forward and backward of a model of these dimensions."""
    tokens, width = work.tokens, setup.width
    blocks = 3 if work.kind == "shared_prefix" else 1
    parts = _held(dims, setup)
    # Made in the first step's exchange and kept: one number for every gradient, on the GPU for NCCL, else pinned.
    flat = GRAD_BYTES * dims.adapter(setup.rank, setup.targets) if _exchanges(work, setup) else 0
    if flat and setup.transport == "nccl":
        parts["gradient exchange"] = float(flat)
    residual = float(width * tokens * dims.hidden)  # is there already when the layers choose
    on_device = min(setup.inputs_on_device, dims.layers)
    inputs = on_device * residual  # a layer's input is as large
    kept = 2.0 * width * work.kept * dims.hidden
    # What the layers find free; and no more than fits, so that more memory never plans for less, nor a shorter length.
    free = setup.gpu_gib * GIB - sum(parts.values()) - residual
    # The layers gather a micro-batch's gradients beside those of the step's earlier ones; autograd adds them up only
    # when the whole backward has returned. The head works before the first of them is there.
    beside = float(GRAD_BYTES * dims.adapter(setup.rank, setup.targets)) if setup.accumulation > 1 else 0.0
    extra = inputs + kept + beside + _rank_bytes(dims, tokens, setup)
    room = USABLE * setup.gpu_gib * GIB - sum(parts.values()) - extra
    tile, groups, _ = choose_tiles(dims, tokens, width, blocks, min(free, room / MARGIN), setup.tile, setup.groups)
    layer = sequence_bytes(dims, tokens, groups, setup.rank, width, blocks, SCRATCH)
    layer["tiles"] = tile_bytes(dims, tile, setup.rank, width)
    if beside:
        layer["accumulated gradients"] = beside
    # The head works while only the residual and the kept rows exist; below its need the layers' is the peak.
    rows = min(setup.chunk, work.kept)
    head = rows * dims.vocabulary * (2 * width + 8) + 2 * kept
    parts |= {"head": head} if head > sum(layer.values()) else {**layer, "kept rows": kept}
    parts["inputs on the GPU"] = inputs
    host = (dims.layers - on_device) * residual
    if setup.recompute == "none":
        host += dims.layers * tokens * (width * dims.q + 4.0 * dims.heads)
    if setup.transport == "gloo":
        host += flat
    return Estimate(work, parts, host, _seconds(dims, work, setup))


def _exchanges(work: Work, setup: Setup) -> bool:
    """Whether several workers sum their gradients: both of a branch-parallel pair, or replicas of either strategy."""
    workers = {"sft": 1, "branch_parallel": 2 * setup.replicas, "shared_prefix": setup.replicas}[work.kind]
    return setup.transport is not None and workers > 1


def _rank_bytes(dims: Dimensions, tokens: int, setup: Setup) -> float:
    """What adapters of this rank take beyond those that `choose_tiles` reckons with, at most."""
    need = [
        sequence_bytes(dims, tokens, 1, rank, setup.width, 1, SCRATCH)["attention"]
        + tile_bytes(dims, setup.tile or max(TILES), rank, setup.width)
        for rank in (setup.rank, RANK)
    ]
    return max(0.0, need[0] - need[1])


def untiled_parts(dims: Dimensions, setup: Setup, tokens: int, logits: int, *, checkpointing: bool) -> dict[str, float]:
    """Rough peak memory by part, in bytes, of plain transformers layers; `logits` positions have theirs at once.

    To say which part is the largest, not what fits: measured peaks on one H200 (SFT of 32,768 tokens, the oracle's two
    branches of 16,384) are met within a tenth, that of one branch of 81,920 tokens within a quarter.
    """
    width = setup.width
    a_layer = float(width * tokens * (8 * dims.hidden + 3 * dims.q + 4 * dims.kv + 6 * dims.mlp))
    parts = _held(dims, setup)
    if checkpointing:
        parts["layer inputs"] = float(width * tokens * dims.layers * dims.hidden)
    else:
        parts["activations of all layers"] = dims.layers * a_layer
    of_logits = float(logits * dims.vocabulary * (width + 4))  # in the compute dtype and in float32
    # Not at the same time: logits are gone when the last layer's backward begins.
    if of_logits > a_layer:
        parts["logits"] = of_logits
    elif checkpointing:
        parts["activations of a layer"] = a_layer
    return parts


def _held(dims: Dimensions, setup: Setup) -> dict[str, float]:
    """What is there all the time."""
    adapter = dims.adapter(setup.rank, setup.targets)
    weight_bytes = min(NF4_BYTES, setup.weight_bytes) if dims.packed else setup.weight_bytes
    return {
        "weights": weight_bytes * dims.layers * dims.layer_weights + setup.width * _outer_weights(dims),
        "adapter": adapter * (4 + GRAD_BYTES + setup.optimizer_bytes),
    }


def _outer_weights(dims: Dimensions) -> int:
    return dims.vocabulary * dims.hidden * (1 if dims.tied_head else 2)


def _seconds(dims: Dimensions, work: Work, setup: Setup) -> float | None:
    rates = setup.rates
    if rates is None:
        return None
    # forward, recomputation without down_proj, input gradients
    down = dims.mlp * dims.hidden
    products = 2.0 * work.tokens * (3 * dims.layer_weights - down)
    attention = 4.0 * work.seen_keys * dims.q
    forwards = 1 if setup.recompute == "none" else 2
    layer = products / rates.product
    layer += forwards * attention / rates.attention_forward + 2.5 * attention / rates.attention_backward
    # Row-wise kernels and adapters: passes over the hidden state, the attention's inputs and the MLP's activations.
    moved = work.tokens * setup.width * (40 * dims.hidden + 12 * (dims.q + 2 * dims.kv) + 32 * dims.mlp)
    layer += moved / rates.memory
    head = 3 * 2.0 * work.kept * dims.vocabulary * dims.hidden / rates.product
    head += 30.0 * work.kept * dims.vocabulary * 4 / rates.memory
    return dims.layers * layer + head
