"""Branches and pairs through the whole model, and the longest pairs under a cap."""

from __future__ import annotations

import functools
from typing import Any

from one_gpu.measuring import GIB, cap, measure, record
from one_gpu.model import qwen3_8b, shared_model
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


def section_long_24() -> None:
    """The longest pair that the planner allows under 24 GiB, through all layers."""
    longest_pair(24, None)


def section_long_80() -> None:
    """The longest pair under 80 GiB, through the first layer with all weights loaded: a layer's peak is every layer's,
    and through all of them it would take more than an hour."""
    longest_pair(80, 1)


def longest_pair(gib: float, layers: int | None) -> None:
    """One step on it under that cap, through the first `layers` or all of them, beside what the planner says of it."""
    from traceforge_core.longcontext.enable import decoder_of

    model = shared_model()
    decoder = decoder_of(model)
    every = decoder.layers
    plan = planned_longest(gib)
    name = f"longest pair under {gib} GiB, {plan.work.prompt} + 2 × {COMPLETION}"
    decoder.layers = every[:layers]
    try:
        with cap(gib):
            enable(model)
            tiled_pair(model, 4096, 64)
            call = functools.partial(tiled_pair, model, plan.work.prompt, COMPLETION)
            measure("long", name, call, cap_gib=gib, layers=len(decoder.layers), planned_gib=plan.peak / GIB)
    finally:
        decoder.layers = every
    record("long", name, host_gib=host_gib(), planned_host_gib_all_layers=plan.host / GIB)


def planned_longest(gib: float) -> Any:
    """The planner's estimate of the longest shared-prefix pair under so much memory."""
    from traceforge_core.longcontext.estimate import Setup
    from traceforge_core.longcontext.memory import Dimensions
    from traceforge_core.longcontext.planner import longest_prompt

    dims = Dimensions.of(qwen3_8b())
    return longest_prompt(dims, Setup(gpu_gib=gib), "shared_prefix", COMPLETION)


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
