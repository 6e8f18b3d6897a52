"""What tiled layers take, in bytes, from a model's dimensions: the formulas behind the planner and the choice of tiles.

Imports no torch. `Dimensions.of(config)` takes a transformers config or the dict of a config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from traceforge_core.longcontext.families import field

NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # 4 bits, an 8-bit scale for 64 weights, a float32 for 256 scales
GRAD_BYTES = 4  # adapters and their gradients are float32
SCRATCH = 8.0  # bytes of kernel scratch a number of q: dq in float32, dk and dv for every query head in bf16
TILES = (2048, 1024, 512)
RANK = 64  # with which tiles are chosen: adapters of any usual rank are small beside the rest
MARGIN = 0.92  # of the free memory; the rest goes to fragmentation


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Of a Llama-like decoder. widths in numbers, not bytes. packed: its weights lie in NF4 already, as they come."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    tied_head: bool
    packed: bool = False

    @classmethod
    def of(cls, config: Any) -> Dimensions:
        """Raises ValueError naming what is missing or is no count."""

        def count(name: str, default: int | None = None) -> int:
            number = field(config, name, default)
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} is missing" if number is None else f"{name} is {number!r}, not a count")
            return number

        hidden, heads = count("hidden_size"), count("num_attention_heads")
        kv_heads = count("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
        return cls(
            layers=count("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=count("head_dim", hidden // heads),
            mlp=count("intermediate_size"),
            vocabulary=count("vocab_size"),
            tied_head=bool(field(config, "tie_word_embeddings", False)),
            packed=_in_four_bits(field(config, "quantization_config", {})),
        )

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(in, out) of each linear layer of a decoder layer."""
        return {
            "q_proj": (self.hidden, self.q),
            "k_proj": (self.hidden, self.kv),
            "v_proj": (self.hidden, self.kv),
            "o_proj": (self.q, self.hidden),
            "gate_proj": (self.hidden, self.mlp),
            "up_proj": (self.hidden, self.mlp),
            "down_proj": (self.mlp, self.hidden),
        }

    @property
    def layer_weights(self) -> int:
        """Numbers in the linear layers of one decoder layer."""
        return sum(width_in * width_out for width_in, width_out in self.projections.values())

    def adapter(self, rank: int, targets: tuple[str, ...] | None = None) -> int:
        """Numbers in a LoRA adapter of all layers; targets None: all seven projections."""
        sizes = (sum(size) for name, size in self.projections.items() if targets is None or name in targets)
        return self.layers * rank * sum(sizes)


def sequence_bytes(
    dims: Dimensions, tokens: int, groups: int, rank: int, width: int, blocks: int, scratch: float
) -> dict[str, float]:
    """Memory of a layer's backward that grows with the sequence, in bytes by part. width: bytes a number.

    hidden: residual and its gradient. attention: q, k, v of all heads, the attention's output and gradient, its
    log-sum-exp, rotary tables, and the share of the heads in work. scratch: bytes of kernel scratch a number of q.
    """
    groups = _divisor(dims.kv_heads, groups)
    qkv = dims.q + 2 * dims.kv + _aligned(3 * rank)
    in_work = width * (2 * dims.q + 3 * dims.kv) / groups  # rotated q and k; dq, dk, dv
    if blocks > 1:
        in_work += width * (dims.q + 2 * dims.kv) / groups  # sums of the blocks' gradients beside one block's
    return {
        "hidden": 2.0 * width * tokens * dims.hidden,
        "attention": tokens * (width * (qkv + 2 * dims.q + 2 * dims.head_dim) + 4 * dims.heads + in_work),
        "workspace": tokens * dims.q / groups * scratch,
    }


def tile_bytes(dims: Dimensions, tile: int, rank: int, width: int) -> float:
    """Memory of the tiles and of one layer's weights in the compute dtype, in bytes."""
    rows = (
        2 * dims.mlp + _aligned(2 * rank)  # gate and up
        + 2 * dims.mlp  # their product and its gradient
        + 3 * dims.hidden  # normed, its gradient, the middle of the layer
        + dims.hidden + _aligned(rank)  # outputs
    )  # fmt: skip
    matrices = dims.layer_weights + rank * sum(sum(size) for size in dims.projections.values())
    return width * (tile * rows + matrices)


def choose_tiles(
    dims: Dimensions, tokens: int, width: int, blocks: int, free: float, tile: int | None, groups: int | None
) -> tuple[int, int, float]:
    """(tile, head groups, bytes they need) for so many bytes that are free when a pass begins.

    What is given is taken; else as many groups as there are KV heads up to 4 and the largest tile that fits, then more
    groups; the smallest where nothing fits. On an H200 tiles of 2048, 4096 and 8192 and 1 to 8 groups were all within
    1% in time, so the choice is for memory.
    """
    for count in [groups] if groups else [min(4, dims.kv_heads), dims.kv_heads]:
        for rows in [tile] if tile else TILES:
            parts = sequence_bytes(dims, tokens, count, RANK, width, blocks, SCRATCH)
            need = sum(parts.values()) + tile_bytes(dims, rows, RANK, width)
            if need <= free * MARGIN:
                return rows, count, need
    return rows, count, need


def _in_four_bits(about: Any) -> bool:
    """Whether a quantization_config, as an object or as its dict, is that of a 4-bit bitsandbytes checkpoint."""
    return bool(field(about, "load_in_4bit", False))


def _aligned(rank: int) -> int:
    return -(-rank // 8) * 8


def _divisor(number: int, wanted: int) -> int:
    return max(count for count in range(1, min(wanted, number) + 1) if number % count == 0)
