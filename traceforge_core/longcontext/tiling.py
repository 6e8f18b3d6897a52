"""Tile size and head groups for one pass, from the memory that is free on the device."""

from __future__ import annotations

import logging
from typing import Any

import torch

from traceforge_core.config import LongContextConfig
from traceforge_core.longcontext.memory import Dimensions, sequence_bytes, tile_bytes

log = logging.getLogger(__name__)
TILES = (2048, 1024, 512)
SCRATCH = 8.0  # bytes of kernel scratch a number of q: dq in float32, dk and dv for every query head
MARGIN = 0.92  # of the free memory; the rest goes to fragmentation


def choose_tiling(
    config: Any, tokens: int, device: torch.device, dtype: torch.dtype, settings: LongContextConfig, blocks: int = 1
) -> tuple[int, int]:
    """(tile, head groups). What the settings name is taken; else as many groups as there are KV heads up to 4, and the
    largest tile that fits, then more groups. On an H200 tiles of 2048, 4096 and 8192 and 1 to 8 groups were all within
    1% in time, so the choice is for memory."""
    dims = Dimensions.of(config)
    groups = settings.head_groups or min(4, dims.kv_heads)
    tile = settings.tile or TILES[0]
    if device.type != "cuda" or (settings.tile and settings.head_groups):
        return tile, groups
    width = torch.finfo(dtype).bits // 8
    free = free_bytes(device) * MARGIN
    group_choices = [settings.head_groups] if settings.head_groups else [groups, dims.kv_heads]
    tile_choices = [settings.tile] if settings.tile else list(TILES)
    for groups in group_choices:
        for tile in tile_choices:
            parts = sequence_bytes(dims, tokens, groups, 64, width, blocks, SCRATCH)
            if sum(parts.values()) + tile_bytes(dims, tile, 64, width) <= free:
                return tile, groups
    log.warning(
        "%d tokens need %.1f GiB beside the model, %.1f GiB are free; trying with the smallest tiles",
        tokens, (sum(parts.values()) + tile_bytes(dims, tile, 64, width)) / 2**30, free / 2**30,
    )  # fmt: skip
    return tile, groups


def free_bytes(device: torch.device) -> float:
    """Device memory that this process can still allocate, its allocator's cache and any cap included."""
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    cap = torch.cuda.get_per_process_memory_fraction(device) * total
    return min(free + reserved - allocated, cap - allocated)
