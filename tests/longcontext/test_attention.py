"""Blocks of attention against SDPA with the mask they stand for, in float64; on a GPU fused kernels against them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from traceforge_core.longcontext import attention, pointwise
from traceforge_core.longcontext.attention import Block, attend, attend_backward, choose_backend

SHARED = [Block(0, 24, 0, 24, True), Block(24, 30, 0, 17, False), Block(24, 30, 24, 30, True)]
PACKED = [Block(0, 9, 0, 9, True), Block(9, 30, 9, 30, True)]
WHOLE = [Block(0, 30, 0, 30, True)]


def mask_of(blocks: list[Block], tokens: int, window: int | None) -> torch.Tensor:
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for one in blocks:
        for query in range(one.q_start, one.q_end):
            last = one.k_start + query - one.q_start if one.causal else one.k_end - 1
            first = max(one.k_start, last - window + 1) if one.causal and window else one.k_start
            mask[query, first : last + 1] = True
    return mask


@settings(max_examples=30, deadline=None)
@given(
    blocks=st.sampled_from([SHARED, PACKED, WHOLE]),
    kv_heads=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 1, 5]),
    scores=st.integers(1, 5000),
)
def test_blocks_equal_sdpa_under_their_mask(
    blocks: list[Block], kv_heads: int, window: int | None, scores: int
) -> None:
    if blocks is SHARED:
        window = None
    q, grad = (torch.randn(30, 4, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(30, kv_heads, 8, dtype=torch.float64) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    heads_first = [x.transpose(0, 1)[None] for x in leaves]
    plain = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, attn_mask=mask_of(blocks, 30, window), scale=0.3, enable_gqa=True
    )[0].transpose(0, 1)
    plain.backward(grad)
    before, attention._SCORES = attention._SCORES, scores  # few query rows at a time
    try:
        out, lse = attend(q, k, v, blocks, 0.3, "math", window)
        found = attend_backward(grad, q, k, v, out, lse, blocks, 0.3, "math", window)
    finally:
        attention._SCORES = before
    assert torch.allclose(out, plain, rtol=1e-12)
    for one, leaf in zip(found, leaves, strict=True):
        assert torch.allclose(one, leaf.grad, rtol=1e-10)


def test_a_cpu_and_float32_take_the_plain_definition() -> None:
    assert choose_backend(torch.device("cpu"), torch.bfloat16, 128) == "math"
    assert choose_backend(torch.device("cpu"), torch.float32, 128) == "math"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_fastest_backend_here_agrees_with_the_plain_definition() -> None:
    q, grad = (torch.randn(30, 4, 64, device="cuda") for _ in range(2))
    k, v = (torch.randn(30, 2, 64, device="cuda") for _ in range(2))
    backend = choose_backend(q.device, torch.bfloat16, 64)
    for blocks in (SHARED, PACKED, WHOLE):
        out, lse = attend(q, k, v, blocks, 0.125, "math")
        exact = (out, *attend_backward(grad, q, k, v, out, lse, blocks, 0.125, "math"))
        low = [x.bfloat16() for x in (q, k, v, grad)]
        out, lse = attend(*low[:3], blocks, 0.125, backend)
        found = (out, *attend_backward(low[3], *low[:3], out, lse, blocks, 0.125, backend))
        for one, other in zip(found, exact, strict=True):
            assert float((one.float() - other).norm() / other.norm()) < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_kernels_agree_with_plain_torch_in_float64(dtype: torch.dtype) -> None:
    limit = 1e-6 if dtype == torch.float32 else 5e-3
    x, grad = (torch.randn(37, 96, device="cuda", dtype=dtype) for _ in range(2))
    weight = torch.rand(96, device="cuda", dtype=dtype) + 0.5
    both = torch.randn(37, 200, device="cuda", dtype=dtype)

    def all_kernels(cast: torch.dtype) -> list[torch.Tensor]:
        cx, cg, cw, cb = (t.to(cast) for t in (x, grad, weight, both.clone()))
        total, act, heads = cg.clone(), torch.empty_like(cx), cx.clone().view(37, 3, 32)
        norm = (cw[:32].contiguous(), 1e-6)
        pointwise.add_rms_norm_backward(cg, cx, cw, 1e-6, total)
        pointwise.swiglu_backward(cg, cb[:, :96], cb[:, 96:192], act)
        turned = pointwise.rotate(heads, cg[:, :32], cg[:, 32:64], norm)
        pointwise.rotate_backward(cg.view(37, 3, 32), heads, cx[:, :32], cx[:, 32:64], norm)
        return [pointwise.rms_norm(cx, cw, 1e-6, torch.empty_like(cx)), total, act, cb[:, :192], turned, heads]

    for one, other in zip(all_kernels(dtype), all_kernels(torch.float64), strict=True):
        assert float((one.double() - other).norm() / other.norm()) < limit


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rotation_goes_on_beyond_a_million_tokens() -> None:
    """A grid's second axis ends at 65,535 programs: with 16 rows each that were 1,048,560 tokens."""
    tokens = 16 * 65_536 + 5
    heads, grad = (torch.randn(tokens, 2, 16, device="cuda") for _ in range(2))
    cos, sin = (torch.randn(tokens, 16, device="cuda") for _ in range(2))
    end = slice(tokens - 40, tokens)
    turned = pointwise.rotate(heads, cos, sin, None)
    torch.testing.assert_close(turned[end], pointwise.rotate(heads[end], cos[end], sin[end], None))
    expected = heads[end].clone()
    pointwise.rotate_backward(grad[end], expected, cos[end], sin[end], None)
    pointwise.rotate_backward(grad, heads, cos, sin, None)
    torch.testing.assert_close(heads[end], expected)
