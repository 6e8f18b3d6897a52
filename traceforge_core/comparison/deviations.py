"""How one run differs from the oracle, step by step, in what the noise of bfloat16 is made of.

    run = deviations(oracle, Path("runs/X/branch_parallel"), last_step=8)
    run.loss[0], run.direction[0]

The same measure for a candidate and for the oracle's own other ways (noise_floor.py); noise.py holds one against the
others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from traceforge_core.comparison.parity import read_steps
from traceforge_core.modeling.adapters import WEIGHTS, read_adapter
from traceforge_core.training.records import read_gradients

NOTHING = 1e-9  # stands for 0 in a logarithm


@dataclass(frozen=True, slots=True)
class Deviations:
    """How one run differs from the oracle, a number a step. loss, score_*: differences. norm: log of the ratio of the
    gradients' lengths. direction: distance of the gradients as unit vectors (0 to 2), estimated from sketches. adapter:
    distance of the adapters after the step, relative to how far the oracle's has moved. moved: log of the ratio of how
    far the two have moved (rounding turns AdamW's steps and hardly lengthens them, so that a wrong rate shows here long
    before it shows in the distance); [] in a floor that was measured without. layer_direction: direction of
    each layer's saved gradient. layer_norm: log of the ratio of its length, beside that of the whole gradient."""

    name: str
    loss: list[float]
    score_chosen: list[float]
    score_rejected: list[float]
    norm: list[float]
    direction: list[float]
    adapter: list[float]
    moved: list[float] = field(default_factory=list)
    layer_direction: dict[str, list[float]] = field(default_factory=dict)
    layer_norm: dict[str, list[float]] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        return len(self.loss)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def deviations(oracle: Path, run: Path, last_step: int, name: str | None = None) -> Deviations:
    """Measure a run against the oracle up to a step."""
    from traceforge_core.training.sketch import cosine, distance, norm

    reference, own = read_steps(oracle)[: last_step + 1], read_steps(run)[: last_step + 1]
    steps = min(last_step, len(reference), len(own))

    def weights(folder: Path, records: Sequence[Any]) -> list[list[float]]:
        """Sketches of the adapter before step 1, after step 1, ..."""
        before = [record.weights_sketch or [] for record in records]
        return before if len(before) > steps else [*before, _sketch_of(folder / "adapter")]

    ours, theirs = weights(run, own), weights(oracle, reference)
    moved = [norm([a - b for a, b in zip(at, theirs[0], strict=True)]) for at in theirs]
    return Deviations(
        name or run.name,
        loss=[own[t].loss - reference[t].loss for t in range(steps)],
        score_chosen=[_minus(own[t].score_chosen, reference[t].score_chosen) for t in range(steps)],
        score_rejected=[_minus(own[t].score_rejected, reference[t].score_rejected) for t in range(steps)],
        norm=[_log_ratio(own[t].grad_norm or 0.0, reference[t].grad_norm or 0.0) for t in range(steps)],
        direction=[
            math.sqrt(max(0.0, 2 - 2 * cosine(own[t].gradient_sketch or [], reference[t].gradient_sketch or [])))
            for t in range(steps)
        ],
        adapter=[distance(ours[t], theirs[t]) / moved[t] if moved[t] else 0.0 for t in range(1, steps + 1)],
        moved=[_log_ratio(distance(ours[t], ours[0]), moved[t]) for t in range(1, steps + 1)],
        **_by_layer(oracle, run, steps),
    )


def _sketch_of(adapter: Path) -> list[float]:
    """Of an adapter on the disk. The oracle's is asked for once a run that is held against it, and made once."""
    weights = adapter / WEIGHTS
    file = weights.stat() if weights.exists() else None  # read_adapter says what is missing
    return _sketch_once(adapter, (file.st_ino, file.st_size, file.st_mtime_ns) if file else None)


@lru_cache(maxsize=8)
def _sketch_once(adapter: Path, written: tuple[int, int, int] | None) -> list[float]:
    """`written`: tells a file from another that takes its place."""
    from traceforge_core.training.sketch import sketch

    return sketch(read_adapter(adapter).items())


def _by_layer(oracle: Path, run: Path, steps: int) -> dict[str, dict[str, list[float]]]:
    turned: dict[str, list[float]] = {}
    stretched: dict[str, list[float]] = {}
    for step in range(1, steps + 1):
        ours, theirs = read_gradients(run, step), read_gradients(oracle, step)
        if ours is None or theirs is None:
            break
        sums: dict[str, list[float]] = {}
        for name, gradient in theirs.items():
            found = re.search(r"\.layers\.(\d+)\.", name)
            row = sums.setdefault(f"layer {found[1]}" if found else "the rest", [0.0, 0.0, 0.0])
            a, b = ours[name].double().reshape(-1), gradient.double().reshape(-1)
            row[0] += float(a @ b)
            row[1] += float(a @ a)
            row[2] += float(b @ b)
        for layer, (product, own, other) in sums.items():
            size = math.sqrt(own * other)
            turned.setdefault(layer, []).append(math.sqrt(max(0.0, 2 - 2 * product / size)) if size else 0.0)
            # Beside what all layers have in common: a wrong factor is the whole gradient's, not a layer's.
            common = math.sqrt(sum(row[1] for row in sums.values())), math.sqrt(sum(row[2] for row in sums.values()))
            apart = _log_ratio(math.sqrt(own), math.sqrt(other)) - _log_ratio(*common)
            stretched.setdefault(layer, []).append(apart)
    return {"layer_direction": turned, "layer_norm": stretched}


def _log_ratio(own: float, other: float) -> float:
    return math.log(max(own, NOTHING) / max(other, NOTHING))


def _minus(own: float | None, other: float | None) -> float:
    return math.nan if own is None or other is None else own - other
