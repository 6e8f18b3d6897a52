"""Branches and pairs through the whole model, and the longest pairs under a cap."""

from __future__ import annotations

import functools

from one_gpu.measuring import GIB, cap, measure, record
from one_gpu.model import shared_model
from one_gpu.steps import (
    COMPLETION,
    PROMPT,
    checkpointing,
    disable,
    enable,
    host_gib,
    plain_branch,
    tiled_branch,
    tiled_pair,
    warm,
)

LONG_PROMPT = 253_952


def section_branch() -> None:
    """One branch and one pair at 77,824 + 4,096, tiled and untiled."""
    model = shared_model()
    with cap(24):
        enable(model)
        warm(model)
        measure("branch", "tiled", lambda: tiled_branch(model, PROMPT, COMPLETION), cap_gib=24)
        measure("branch", "pair, shared prefix", lambda: tiled_pair(model, PROMPT, COMPLETION), cap_gib=24)
        record("branch", "pair, shared prefix", host_gib=host_gib())
        for prompt in (12_288, 28_672):
            call = functools.partial(tiled_branch, model, prompt, COMPLETION)
            measure("branch", f"tiled {prompt} + {COMPLETION}", call, repeats=2)
            call = functools.partial(tiled_pair, model, prompt, COMPLETION)
            measure("branch", f"pair {prompt} + {COMPLETION}", call, repeats=2)
        enable(model, recompute="none")
        tiled_branch(model, 4096, 64)
        measure("branch", "tiled, attention kept", lambda: tiled_branch(model, PROMPT, COMPLETION), cap_gib=24)
        record("branch", "attention kept", host_gib=host_gib())
    disable(model)
    checkpointing(model, True)
    plain_branch(model, 4096, 64)
    measure("branch", "untiled, cuDNN attention", lambda: plain_branch(model, PROMPT, COMPLETION))
    checkpointing(model, False)


def section_long() -> None:
    """Long pairs, all weights loaded, the first layers run: a layer's peak is every layer's, and time adds up."""
    from traceforge_core.longcontext.enable import decoder_of

    model = shared_model()
    decoder = decoder_of(model)
    every, count = decoder.layers, len(decoder.layers)
    for prompt, layers, gib, settings in (
        (LONG_PROMPT, 4, 24, {}),
        (310_784, 1, 24, {"head_groups": 8, "tile": 1024}),
        (542_720, 1, 80 - 10 * (542_720 + 2 * COMPLETION) * 8192 / GIB, {"head_groups": 8, "tile": 1024}),
    ):
        decoder.layers = every[:layers]
        try:
            with cap(gib):
                enable(model, **settings)
                call = functools.partial(tiled_pair, model, prompt, COMPLETION)
                seconds = measure("long", f"pair {prompt} + 2 × {COMPLETION}", call, cap_gib=gib, layers=layers)
        finally:
            decoder.layers = every
        record("long", f"pair {prompt}", layers_of=f"{layers} of {count}", seconds_all_layers=seconds * count / layers)


def section_long_whole() -> None:
    """The pair at 253,952 + 2 × 4,096 through all 36 layers, under a 24 GiB cap."""
    model = shared_model()
    with cap(24):
        enable(model)
        warm(model)
        measure(
            "long", "whole pair 253,952 + 2 × 4,096", lambda: tiled_pair(model, LONG_PROMPT, COMPLETION), cap_gib=24
        )
        record("long", "whole pair 253,952 + 2 × 4,096", host_gib=host_gib())
