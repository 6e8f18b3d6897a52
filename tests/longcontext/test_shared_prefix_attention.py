"""The shared-prefix pass against two branches of their own, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.longcontext.conftest import VOCABULARY, assert_close, gradients, tiny
from traceforge_core.config import LongContextConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.longcontext.enable import decoder_of, enable_long_context
from traceforge_core.longcontext.shared_prefix_attention import Pair, lay_out, pair_log_probs


def make_pair(prompt: int, chosen: int, rejected: int) -> Pair:
    def draw(count: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (count,))

    counted = [torch.rand(count) > 0.3 for count in (chosen, rejected)]
    for mask in counted:
        mask[-1] = True
    return Pair(draw(prompt), draw(chosen), draw(rejected), *counted)


def two_branches(model: Any, pairs: list[Pair]) -> torch.Tensor:
    """Log-probs in the order of `pair_log_probs`, each branch in a pass of its own through transformers."""
    parts = []
    for pair in pairs:
        branches = ((pair.chosen, pair.counted_chosen), (pair.rejected, pair.counted_rejected))
        for completion, counted in branches:
            logits = model(input_ids=torch.cat([pair.prompt, completion])[None], use_cache=False).logits[0]
            log_probs = logits.log_softmax(-1)[len(pair.prompt) - 1 : -1].gather(-1, completion[:, None])[:, 0]
            parts.append(log_probs[counted])
    return torch.cat(parts)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    family=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=2),
    tile=st.integers(1, 30),
    groups=st.integers(1, 2),
    recompute=st.sampled_from(["attention", "none"]),
)
def test_one_pass_over_a_pair_equals_two_branches(
    family: str, sizes: list[tuple[int, int, int]], tile: int, groups: int, recompute: Any, wide_norms: None
) -> None:
    model = tiny(family)
    pairs = [make_pair(*size) for size in sizes]
    plain = two_branches(model, pairs)
    weights = torch.randn(plain.shape, dtype=torch.float64)
    (plain * weights).sum().backward()
    expected = gradients(model)
    enable_long_context(model, "on", LongContextConfig(tile=tile, head_groups=groups, recompute=recompute))
    found, branch = pair_log_probs(model, pairs)
    (found * weights).sum().backward()
    assert torch.allclose(found, plain, rtol=1e-10)
    assert_close(gradients(model), expected, 1e-10)
    counts = [int(m.sum()) for pair in pairs for m in (pair.counted_chosen, pair.counted_rejected)]
    assert branch.tolist() == [side for side, count in enumerate(counts) for _ in range(count)]


def test_the_first_token_of_each_completion_is_predicted_by_the_prompts_last() -> None:
    every = torch.ones(2, dtype=torch.bool)
    pair = Pair(torch.tensor([5, 6, 7]), torch.tensor([1, 2]), torch.tensor([3, 4]), every, every)
    batch = lay_out([pair])
    assert batch.ids.tolist() == [5, 6, 7, 1, 2, 3, 4]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 3, 4]
    assert batch.keep.tolist() == [2, 3, 2, 5]
    assert batch.targets.tolist() == [1, 2, 3, 4]


def test_a_sliding_window_and_a_rotation_that_depends_on_the_length_are_refused() -> None:
    model = tiny("mistral-window", torch.float32)
    enable_long_context(model, "on", LongContextConfig())
    with pytest.raises(TraceForgeError, match=r"sliding window only \(7 tokens\)"):
        pair_log_probs(model, [make_pair(5, 2, 3)])
    model = tiny("llama", torch.float32)
    decoder_of(model).config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    enable_long_context(model, "on", LongContextConfig())
    with pytest.raises(TraceForgeError, match=r"depends on the sequence's length \(rope_type dynamic\)"):
        pair_log_probs(model, [make_pair(5, 2, 3)])


@pytest.mark.parametrize("sizes", [(0, 2, 3), (5, 0, 3), (5, 2, 0)])
def test_a_pair_with_an_empty_part_is_refused(sizes: tuple[int, int, int]) -> None:
    prompt, chosen, rejected = (torch.ones(size, dtype=torch.long) for size in sizes)
    with pytest.raises(ValueError, match=r"Pair 0 has \d \+ \d and \d tokens"):
        lay_out([Pair(prompt, chosen, rejected, chosen.bool(), rejected.bool())])


def test_a_model_that_is_not_enabled_is_refused() -> None:
    with pytest.raises(TraceForgeError, match="enable_long_context"):
        pair_log_probs(tiny("llama", torch.float32), [make_pair(5, 2, 3)])
