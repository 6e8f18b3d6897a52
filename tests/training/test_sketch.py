"""Sketches: the sums that their definition names, whatever the shapes, and the distances they stand for."""

from __future__ import annotations

import math

import pytest
import torch

from traceforge_core.training import sketch as module
from traceforge_core.training.sketch import (
    SKETCH_SIZE,
    cosine,
    distance,
    norm,
    signed_sums,
    signed_sums_at_once,
    sketch,
)

WRAP = (1 << 64) - 1


def sign(k: int, place: int) -> int:
    """By SplitMix64 (Steele, Lea and Flood 2014) of the place: bit k says minus."""
    mixed = (place + 0x9E3779B97F4A7C15) & WRAP
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & WRAP
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & WRAP
    return -1 if ((mixed ^ (mixed >> 31)) >> k) & 1 else 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sketch_is_the_signed_sums_of_all_values_in_the_order_of_their_names(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", {"cpu": 200})  # the longest tensor is taken in three parts
    draw = torch.Generator().manual_seed(0)
    shapes = {"b": (17, 30), "a": (4,), "empty": (0, 3), "c": (1,)}
    tensors = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    values = [value for name in sorted(tensors) for value in tensors[name].double().flatten().tolist()]
    exact = [math.fsum(sign(k, i) * value for i, value in enumerate(values)) for k in range(SKETCH_SIZE)]
    size = math.sqrt(sum(value * value for value in values))
    assert sketch(tensors.items()) == pytest.approx(exact, rel=0, abs=1e-14 * size)
    assert sketch([]) == [0.0] * SKETCH_SIZE


def test_the_two_ways_of_summing_give_the_same() -> None:
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(100_000, generator=draw, dtype=torch.float64)
    bits = torch.randint(-(2**63), 2**63 - 1, (100_000,), generator=draw)
    fast, plain = signed_sums(values, bits), signed_sums_at_once(values, bits)
    assert fast.tolist() == pytest.approx(plain.tolist(), rel=0, abs=1e-13 * float(values.norm()))
    assert torch.equal(fast, signed_sums(values, bits))


def test_distance_length_and_angle_are_estimated_within_a_third() -> None:
    draw = torch.Generator().manual_seed(2)
    x, step = torch.randn(2, 50_000, generator=draw)
    y = x + 0.1 * step
    ours, theirs = sketch([("x", x)]), sketch([("x", y)])
    assert norm(ours) == pytest.approx(float(x.norm()), rel=0.33)
    assert distance(ours, theirs) == pytest.approx(float((x - y).norm()), rel=0.33)
    assert cosine(ours, theirs) > 0.98
    assert distance(ours, sketch([("x", x.clone())])) == 0.0


def test_one_value_that_is_nan_makes_every_sum_nan() -> None:
    values = torch.ones(1000)
    values[123] = math.nan
    assert all(math.isnan(value) for value in sketch([("x", values)]))
