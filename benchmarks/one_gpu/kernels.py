"""Row-wise kernels, matrix products and pinned memory, beside plain torch and Liger."""

from __future__ import annotations

import time

import torch
from one_gpu.measuring import GIB, kernel_seconds, record


def section_kernels() -> None:
    """Row-wise kernels and matrix products at the sizes of one tile."""
    from traceforge_core.longcontext import kernels, pointwise

    rows, width, mlp = 4096, 4096, 12_288
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    x, d, w = make(rows, width), make(rows, width), make(width)
    both, act, d_act = make(rows, 2 * mlp + 32), make(rows, mlp), make(rows, mlp)
    gate, up = both[:, :mlp], both[:, mlp : 2 * mlp]
    raw, cos, sin = make(81_920, 6192), make(81_920, 128), make(81_920, 128)
    q, q_out = raw[:, :1024].unflatten(1, (8, 128)), make(81_920, 8, 128)
    work = {
        "rms_norm": (lambda: kernels.rms_norm(x, w, 1e-6, d), 2 * x.nbytes),
        "rms_norm backward": (lambda: kernels.add_rms_norm_backward(d, x, w, 1e-6, d_act[:, :width]), 4 * x.nbytes),
        "swiglu": (lambda: kernels.swiglu(gate, up, act), 3 * act.nbytes),
        "swiglu backward": (lambda: kernels.swiglu_backward(d_act, gate, up, act), 6 * act.nbytes),
        "rotate 8 heads of 82K": (lambda: kernels.rotate(q, cos, sin, (w[:128], 1e-6), q_out), 2 * q_out.nbytes),
        "rotate backward": (lambda: kernels.rotate_backward(q_out, q, cos, sin, (w[:128], 1e-6)), 3 * q_out.nbytes),
    }
    for name, (call, moved) in work.items():
        seconds = kernel_seconds(call)
        record("kernels", f"ours {name}", microseconds=seconds * 1e6, tb_per_s=moved / seconds / 1e12)
    plain, pointwise._fused = pointwise._fused, lambda _: False
    for name, call in {
        "rms_norm": lambda: pointwise.rms_norm(x, w, 1e-6, d),
        "swiglu": lambda: pointwise.swiglu(gate, up, act),
        "swiglu backward": lambda: pointwise.swiglu_backward(d_act, gate, up, act),
        "rotate 8 heads of 82K": lambda: pointwise.rotate(q, cos, sin, (w[:128], 1e-6), q_out),
    }.items():
        record("kernels", f"torch {name}", microseconds=kernel_seconds(call) * 1e6)
    pointwise._fused = plain
    try:
        from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward
        from liger_kernel.ops.swiglu import swiglu_backward, swiglu_forward

        record(
            "kernels",
            "liger rms_norm",
            microseconds=1e6 * kernel_seconds(lambda: rms_norm_forward(x, w, 1e-6, 0.0, "llama", False)),
        )
        _, saved, rstd, block, warps, mode = rms_norm_forward(x, w, 1e-6, 0.0, "llama", False)
        record(
            "kernels",
            "liger rms_norm backward",
            microseconds=1e6
            * kernel_seconds(lambda: rms_norm_backward(d, saved, w, rstd, 0.0, mode, block, warps, False, False)),
        )
        g, u = gate.contiguous(), up.contiguous()
        record("kernels", "liger swiglu", microseconds=1e6 * kernel_seconds(lambda: swiglu_forward(g, u)))
        record(
            "kernels", "liger swiglu backward", microseconds=1e6 * kernel_seconds(lambda: swiglu_backward(g, u, d_act))
        )
    except Exception as error:
        record("kernels", "liger", failed=repr(error)[:300])

    matrix = make(24_576 + 32, width)
    for tile in (2048, 4096, 8192):
        a, y = make(tile, width), make(tile, 24_576 + 32)
        for name, left, right, out in (
            ("gate_up + A", a, matrix.t(), y),
            ("gate_up", a, matrix[:24_576].t(), make(tile, 24_576)),
            ("gate_up input gradient", y, matrix, make(tile, width)),
        ):
            seconds = kernel_seconds(lambda left=left, right=right, out=out: torch.mm(left, right, out=out))
            flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
            record("kernels", f"product {name}, tile {tile}", microseconds=seconds * 1e6, tflops=flops / seconds / 1e12)
    y, inner, up_matrix = make(rows, 24_576 + 32), make(rows, 32), make(24_576, 32)
    for name, call in {
        "add B": lambda: y[:, :24_576].addmm_(inner, up_matrix.t()),
        "grad B": lambda: torch.mm(y[:, :24_576].t(), inner, out_dtype=torch.float32),
        "grad A": lambda: torch.mm(inner.t(), x, out_dtype=torch.float32),
        "grad inner": lambda: y[:, :24_576] @ up_matrix,
        "grad B in float32": lambda: y[:, :24_576].float().t() @ inner.float(),
    }.items():
        record("kernels", f"lora gate_up {name}", microseconds=kernel_seconds(call) * 1e6)
    from traceforge_core.longcontext import host_store

    start = time.perf_counter()
    host_store._blocks.free += host_store._pinned_slab() + host_store._pinned_slab()
    record("kernels", "pin 2 GiB by registration", seconds=time.perf_counter() - start)
    start = time.perf_counter()
    torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    record("kernels", "pin 1 GiB by cudaHostAlloc", seconds=time.perf_counter() - start)
