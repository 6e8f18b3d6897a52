"""Tile size and head groups for one pass, from the memory that is free on the device."""

from __future__ import annotations

import logging
from typing import Any

import torch

from traceforge_core.config import LongContextConfig
from traceforge_core.longcontext.memory import TILES, Dimensions, choose_tiles

log = logging.getLogger(__name__)


def choose_tiling(
    config: Any, tokens: int, device: torch.device, dtype: torch.dtype, settings: LongContextConfig, blocks: int = 1
) -> tuple[int, int]:
    """(tile, head groups). What the settings name is taken; the rest follows from the free memory (`choose_tiles`, by
    which the planner goes too); without a GPU it is the first choice."""
    dims = Dimensions.of(config)
    if device.type != "cuda":
        return settings.tile or TILES[0], settings.head_groups or min(4, dims.kv_heads)
    free = free_bytes(device)
    width = torch.finfo(dtype).bits // 8
    tile, groups, need = choose_tiles(dims, tokens, width, blocks, free, settings.tile, settings.head_groups)
    if need > free:
        log.warning(
            "%d tokens need %.1f GiB beside the model, %.1f GiB are free; trying in tiles of %d and %d head groups",
            tokens, need / 2**30, free / 2**30, tile, groups,
        )  # fmt: skip
    return tile, groups


def free_bytes(device: torch.device) -> float:
    """Device memory that this process can still allocate, its allocator's cache and any cap included."""
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    cap = torch.cuda.get_per_process_memory_fraction(device) * total
    return min(free + reserved - allocated, cap - allocated)
