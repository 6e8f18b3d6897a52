"""Where the time of a tiled layer goes, and its attention calls by backend."""

from __future__ import annotations

from typing import Any

import torch
from one_gpu.measuring import OUT, kernel_seconds, measure, record
from one_gpu.model import load
from one_gpu.steps import COMPLETION, PROMPT, checkpointing, disable, enable, plain_branch, tiled_branch, tiled_pair


def section_layers() -> None:
    """Four layers: where the time of a layer goes, and what tile and groups do to it."""
    model = load(layers=4)
    branch = lambda: tiled_branch(model, PROMPT, COMPLETION)  # noqa: E731
    enable(model)
    tiled_branch(model, 4096, 64)
    for settings in (
        {}, {"tile": 2048}, {"tile": 8192}, {"head_groups": 1}, {"head_groups": 2}, {"head_groups": 8},
        {"recompute": "none"},
    ):  # fmt: skip
        enable(model, **settings)
        measure("layers", f"tiled branch {settings}", branch, repeats=2)
    enable(model)
    measure("layers", "tiled pair", lambda: tiled_pair(model, PROMPT, COMPLETION), repeats=2)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        branch()
        torch.cuda.synchronize()
    (OUT / "profile.txt").write_text(
        profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=90)
    )
    print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=24, max_name_column_width=60))
    disable(model)
    checkpointing(model, True)
    measure("layers", "plain branch, cuDNN", lambda: plain_branch(model, PROMPT, COMPLETION), repeats=2)


def _time_block(name: str, one: Any, backend: Any, q: Any, k: Any, v: Any, grad: Any) -> None:
    from traceforge_core.longcontext.attention import attend, attend_backward

    out, lse = attend(q, k, v, [one], 0.088, backend)
    forward = kernel_seconds(lambda: attend(q, k, v, [one], 0.088, backend), 3)
    backward = kernel_seconds(lambda: attend_backward(grad, q, k, v, out, lse, [one], 0.088, backend), 3)
    record("blocks", f"{name} {backend}", forward_ms=forward * 1e3, backward_ms=backward * 1e3)


def section_blocks() -> None:
    """The three attention calls of a shared prefix, a quarter of the heads, by backend; then the pair's profile."""
    from traceforge_core.longcontext.attention import Block

    total = PROMPT + 2 * COMPLETION
    middle = PROMPT + COMPLETION
    q, grad = (torch.randn(total, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(total, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for name, one in {
        "chosen": Block(0, middle, 0, middle, True),
        "rejected to prompt": Block(0, COMPLETION, 0, PROMPT, False),
        "rejected to itself": Block(0, COMPLETION, 0, COMPLETION, True),
    }.items():
        for backend in ("cudnn", "flash"):
            _time_block(name, one, backend, q[: one.q_end], k[: one.k_end], v[: one.k_end], grad[: one.q_end])
    del q, k, v, grad
    model = load(layers=4)
    enable(model)
    tiled_pair(model, 4096, 64)
    measure("blocks", "pair, 4 layers", lambda: tiled_pair(model, PROMPT, COMPLETION), repeats=2)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        tiled_pair(model, PROMPT, COMPLETION)
        torch.cuda.synchronize()
    print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=16, max_name_column_width=70))
    enable(model, recompute="none")
    measure("blocks", "branch, 4 layers, none", lambda: tiled_branch(model, PROMPT, COMPLETION), repeats=2)
