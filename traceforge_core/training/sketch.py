"""A few numbers that stand for millions: random-sign sums, from which distances between two runs can be estimated.

    s = sketch([("a.lora_A", tensor), ...])        # SKETCH_SIZE floats
    distance(s, other)                             # about ‖x - y‖, within a fifth or so

Entry k is Σ_i σ_k(i)·x_i with signs σ_k(i) hashed from k and the place i, so E[(s_k - t_k)²] = ‖x - y‖² (Alon, Matias
and Szegedy 1996). With 32 of them the estimate's standard deviation is 1/sqrt(2·32) = 13%. The step log can thus say
how far two runs' weights and gradients are apart at every step without keeping either. Signs depend on nothing but the
place, so sketches of different processes, devices and versions can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

SKETCH_SIZE = 32
CHUNK = {"cpu": 1 << 16, "cuda": 1 << 18}  # values taken at once: they fit a cache, or their signs take 64 MiB
# Two multipliers of SplitMix64's finaliser, as signed 64-bit integers.
_MIX = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_SIGNS = (1 - 2 * ((torch.arange(256)[:, None] >> torch.arange(8)) & 1)).double()  # of each byte's eight bits


def sketch(named: Iterable[tuple[str, torch.Tensor]]) -> list[float]:
    """SKETCH_SIZE float64 sums over all values, taken in the order of their names."""
    sums: torch.Tensor | None = None
    place = 0
    for _, tensor in sorted(named, key=lambda pair: pair[0]):
        flat = tensor.detach().reshape(-1)
        size = CHUNK[flat.device.type]
        for start in range(0, flat.numel(), size):
            chunk = flat[start : start + size].double()
            bits = _hash(torch.arange(place, place + chunk.numel(), device=chunk.device))
            part = signed_sums(chunk, bits) if chunk.is_cpu else signed_sums_at_once(chunk, bits)
            sums = part if sums is None else sums + part.to(sums.device)
            place += chunk.numel()
    return [0.0] * SKETCH_SIZE if sums is None else sums.tolist()


def signed_sums(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """SKETCH_SIZE float64 sums of `values` (float64), the k-th with a minus wherever bit k of `bits` (int64) is set.

    First the values with the same byte are summed, then the 256 sums are given their signs: four passes over the values
    instead of SKETCH_SIZE, and on a CPU some ten times as fast. A GPU would sum the bytes' values in another order each
    time, and two equal runs would not have equal sketches.
    """
    shifts = range(0, SKETCH_SIZE, 8)
    return torch.cat([torch.bincount((bits >> k) & 255, values, minlength=256) @ _SIGNS for k in shifts])


def signed_sums_at_once(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The same up to rounding, as one product: on a GPU, where it is always summed in the same order and a sum for each
    sign takes longer to launch than to compute."""
    rows = torch.arange(SKETCH_SIZE, device=values.device)[:, None]
    return (1 - 2 * ((bits >> rows) & 1)).double() @ values


def distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Estimate of the L2 distance of the two vectors that were sketched."""
    return norm([own - other for own, other in zip(ours, theirs, strict=True)])


def norm(values: Sequence[float]) -> float:
    """Estimate of the L2 norm of the vector that was sketched (or of a difference of sketches)."""
    return math.sqrt(sum(value * value for value in values) / len(values))


def cosine(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Estimate of the cosine of the angle between the two vectors. NaN where one is zero."""
    product = sum(own * other for own, other in zip(ours, theirs, strict=True)) / len(ours)
    size = norm(ours) * norm(theirs)
    return product / size if size else math.nan


def _hash(places: torch.Tensor) -> torch.Tensor:
    """64 well-mixed bits for each place (int64 in and out; products wrap)."""
    mixed = places + -0x61C8864680B583EB
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * _MIX[0]
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * _MIX[1]
    return mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)
