"""Whether the computation is right on this device: before anything is timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from one_gpu.measuring import record
from one_gpu.steps import enable


def section_checks() -> None:
    """Attention backends, Triton kernels and whole tiny models on this device against plain torch."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "longcontext"))
    from traceforge_core.longcontext import attention, pointwise
    from traceforge_core.longcontext.attention import Block, attend, attend_backward

    def distance(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one.double() - other.double()).norm() / other.double().norm())

    torch.manual_seed(0)
    layouts = {
        "causal": [Block(0, 1000, 0, 1000, True)],
        "two samples": [Block(0, 300, 0, 300, True), Block(300, 1000, 300, 1000, True)],
        "shared prefix": [
            Block(0, 800, 0, 800, True),
            Block(800, 1000, 0, 700, False),
            Block(800, 1000, 800, 1000, True),
        ],
    }
    q, grad = (torch.randn(1000, 8, 128, device="cuda") for _ in range(2))
    raw = torch.randn(1000, 4 * 128 + 8, device="cuda")[:, :512].unflatten(1, (4, 128))
    for name, blocks in layouts.items():
        k, v = raw[:, :2], raw[:, 2:]
        out, lse = attend(q, k, v, blocks, 0.088, "math")
        exact = (out, lse, *attend_backward(grad, q, k, v, out, lse, blocks, 0.088, "math"))
        for backend in ("flash", "cudnn"):
            try:
                h = [x.bfloat16() for x in (q, k, v, grad)]
                # v stays a view into a wider row, as in a layer
                h[2] = raw.bfloat16()[:, 2:]
                out, lse = attend(h[0], h[1], h[2], blocks, 0.088, backend)
                got = (out, lse, *attend_backward(h[3], h[0], h[1], h[2], out, lse, blocks, 0.088, backend))
                errors = [round(distance(a, b), 5) for a, b in zip(got, exact, strict=True)]
                record("checks", f"attention {backend} {name}", out_lse_dq_dk_dv=errors)
            except Exception as error:  # the table says so and goes on
                record("checks", f"attention {backend} {name}", failed=repr(error)[:300])
    record("checks", "backend", chosen=attention.choose_backend(torch.device("cuda", 0), torch.bfloat16, 128))

    x, d = (torch.randn(777, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w = torch.rand(4096, device="cuda", dtype=torch.bfloat16) + 0.5
    heads = torch.randn(777, 40 * 128 + 8, device="cuda", dtype=torch.bfloat16)[:, :5120].unflatten(1, (40, 128))
    cos, sin = (torch.randn(777, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    both = torch.randn(777, 8200, device="cuda", dtype=torch.bfloat16)
    norm = (w[:128].contiguous(), 1e-6)

    def kernels(cast: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        cx, cd, cw, ch, cc, cs, cb = (cast(t) for t in (x, d, w, heads, cos, sin, both))
        add, turned, pair, act = cd.clone(), ch.clone(), cb.clone(), torch.empty_like(cx)
        pointwise.add_rms_norm_backward(cd, cx, cw, 1e-6, add)
        first = pointwise.rotate(ch, cc, cs, (cast(norm[0]), 1e-6))
        pointwise.rotate_backward(ch, turned, cc, cs, (cast(norm[0]), 1e-6))
        pointwise.swiglu_backward(cd, pair[:, :4096], pair[:, 4096:8192], act)
        return [pointwise.rms_norm(cx, cw, 1e-6, torch.empty_like(cx)), add, first, turned, act, pair[:, :8192]]

    # float64 takes the plain torch path
    exact64 = kernels(lambda t: t.double())
    for name, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        got = kernels(lambda t, dtype=dtype: t.to(dtype))
        record(
            "checks",
            f"kernels {name}",
            norm_dnorm_rotate_drotate_act_dglu=[round(distance(a, b), 8) for a, b in zip(got, exact64, strict=True)],
        )

    import conftest

    for family in conftest.CONFIGS:
        model = conftest.tiny(family, torch.float32).cuda()
        ids = torch.randint(0, 97, (2, 200), device="cuda")
        mask = torch.ones_like(ids)
        mask[0, :9] = 0
        labels = ids.masked_fill(mask == 0, -100)
        labels[0, 9] = -100
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        plain, value = conftest.gradients(model), loss.item()
        for recompute in ("attention", "none"):
            enable(model, tile=64, head_groups=2, recompute=recompute)
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            tiled = conftest.gradients(model)
            worst = max(distance(tiled[name], plain[name]) for name in plain)
            record("checks", f"{family} float32 {recompute}", loss=abs(loss.item() - value) / value, gradients=worst)
