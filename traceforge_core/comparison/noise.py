"""Where a strategy's difference from the oracle lies in the oracle's difference from itself.

    floor = [deviations(oracle, run, last_step=8) for run in variant_runs]
    places = place(deviations(oracle, candidate, last_step=8), floor, config.comparison.confidence)
    verdict = judge_by_noise(parity, places, config.comparison, runs=len(floor))

In bfloat16 two right computations differ, and by how much depends on model, data and device: so the oracle itself is
run again in ways that must not matter. What a right candidate differs by is one more draw of the same kind. Each
quantity is tested at every step and as its mean over the steps so far, which finds a small but steady error. A
statistic is the difference in units of 1.5 times the noise (another right computation may round that much more); its
limit is Student's t at the wanted confidence, shared among all tests (Bonferroni).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from traceforge_core.comparison.parity import Parity, read_steps, saved_gradients
from traceforge_core.comparison.verdict import Finding, Place, Verdict, failed, invariant_findings
from traceforge_core.config import ComparisonConfig
from traceforge_core.modeling.adapters import read_adapter

# Differences with a sign, and distances without one; each in the chain's words.
SIGNED = {
    "score_chosen": "score",
    "score_rejected": "score",
    "loss": "loss",
    "norm": "gradient norm",
    "moved": "adapter",
}
DISTANCES = {"direction": "gradient direction", "adapter": "adapter"}
NAMES = {"score_chosen": "score chosen", "score_rejected": "score rejected", "moved": "length of the adapter's way"}
WINDOW = 1  # steps on either side whose noise is pooled with a step's own
ROUNDING = 1e-6  # no noise is taken to be smaller: float32 itself is not finer
SPREAD_OF_DISTANCES = 0.15  # log units; a few runs of one kind may by chance be closer than the next right one
NOTHING = 1e-9
# Another right way of computing may round this many times as much as the oracle's own ways do.
ALLOWED = 1.5


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
    from traceforge_core.training.sketch import cosine, distance, norm, sketch

    reference, own = read_steps(oracle)[: last_step + 1], read_steps(run)[: last_step + 1]
    steps = min(last_step, len(reference), len(own))

    def weights(folder: Path, records: Sequence[Any]) -> list[list[float]]:
        """Sketches of the adapter before step 1, after step 1, ..."""
        before = [record.weights_sketch or [] for record in records]
        return before if len(before) > steps else [*before, sketch(read_adapter(folder / "adapter").items())]

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


def place(candidate: Deviations, floor: Sequence[Deviations], confidence: float) -> list[Place]:
    """The candidate's place in every quantity, in the order of the chain. Needs at least three runs in the floor."""
    steps = min(candidate.steps, *(run.steps for run in floor))
    layers = [name for name in candidate.layer_norm if all(name in run.layer_norm for run in floor)]
    signed = {name: quantity for name, quantity in SIGNED.items() if all(getattr(run, name) for run in floor)}
    tests = 2 * steps * (len(signed) + len(DISTANCES)) + 2 * sum(len(candidate.layer_norm[name]) for name in layers)
    chance = (1 - confidence) / tests
    rows = []
    for name, quantity in signed.items():
        rows.append(_place_signed(name, quantity, candidate, floor, steps, chance))
    for name, quantity in DISTANCES.items():
        rows.append(_place_distance(name, quantity, candidate, floor, steps, chance))
    rows += _place_layers(candidate, floor, layers, chance)
    return rows


def judge_by_noise(parity: Parity, places: Sequence[Place], tolerances: ComparisonConfig, runs: int) -> Verdict:
    """What rounding cannot excuse, and what it excuses only within the noise."""
    findings = invariant_findings(parity, tolerances)
    if parity.unequal or not parity.steps:
        return failed(findings)
    reasons = [
        f"judged against {runs} runs of the oracle that differ from it only by rounding, at "
        f"{tolerances.confidence:.1%} confidence over all tests together"
    ]
    for at in places:
        if at.left_at is not None:
            # The adapter after a step is the adapter before the next.
            step = at.left_at + (at.quantity == "adapter")
            findings.append(Finding(at.quantity, step, at.statistic, at.limit, at.what))
    widest = max(places, key=lambda at: at.statistic / at.limit)
    reasons.append(
        f"furthest out: {widest.name}, {widest.statistic:.2f} times the noise at step {widest.step}, where "
        f"{widest.limit:.2f} may be"
    )
    if findings:
        return replace(failed(findings, reasons), places=list(places))
    return Verdict("pass", reasons, places=list(places))


def noise_band(floor: Sequence[Deviations], name: str) -> list[float]:
    """The noise of a quantity at each step: RMS of the floor's differences there and at the neighbouring steps, but no
    less than 0.7 of the RMS over all steps, since a few runs may agree at one step by chance."""
    steps = min(run.steps for run in floor)
    values = [getattr(run, name)[:steps] for run in floor]
    least = 0.5 * fmean(value * value for run in values for value in run)
    band = []
    for t in range(steps):
        near = [value for run in values for value in run[max(0, t - WINDOW) : t + WINDOW + 1]]
        band.append(max(ROUNDING, math.sqrt(max(least, fmean(value * value for value in near)))))
    return band


def _place_signed(
    name: str, quantity: str, candidate: Deviations, floor: Sequence[Deviations], steps: int, chance: float
) -> Place:
    band = noise_band(floor, name)
    own = [value / (noise * ALLOWED) for value, noise in zip(getattr(candidate, name)[:steps], band, strict=False)]
    others = [[value / noise for value, noise in zip(getattr(run, name), band, strict=False)] for run in floor]
    runs = len(floor)
    at_step, drifting = student(1 - chance / 2, runs * (1 + 2 * WINDOW)), student(1 - chance / 2, runs)
    tests = []
    for t in range(steps):
        tests.append((abs(own[t]), at_step, t, "at that step"))
        spread = math.sqrt(fmean(fmean(run[: t + 1]) ** 2 for run in others))
        drift = abs(fmean(own[: t + 1])) / max(spread, 0.5 / math.sqrt(t + 1))
        tests.append((drift, drifting, t, f"on average over {t + 1} steps"))
    return _placed(quantity, NAMES.get(name, quantity), tests, getattr(candidate, name), band)


def _place_distance(
    name: str, quantity: str, candidate: Deviations, floor: Sequence[Deviations], steps: int, chance: float
) -> Place:
    values = [[math.log(max(value, NOTHING)) for value in getattr(run, name)[:steps]] for run in floor]
    centre = [fmean(run[t] for run in values) for t in range(steps)]
    own = [
        math.log(max(value, NOTHING) / ALLOWED) - centre[t] for t, value in enumerate(getattr(candidate, name)[:steps])
    ]
    others = [[run[t] - centre[t] for t in range(steps)] for run in values]
    runs = len(floor)
    spread = math.sqrt(sum(value * value for run in others for value in run) / ((runs - 1) * steps))
    widen = math.sqrt(1 + 1 / runs)
    at_step, drifting = student(1 - chance, (runs - 1) * min(steps, 3)), student(1 - chance, runs - 1)
    tests = []
    for t in range(steps):
        tests.append((own[t] / (max(spread, SPREAD_OF_DISTANCES) * widen), at_step, t, "at that step"))
        of_means = math.sqrt(sum(fmean(run[: t + 1]) ** 2 for run in others) / (runs - 1))
        drift = fmean(own[: t + 1]) / (max(of_means, SPREAD_OF_DISTANCES) * widen)
        tests.append((drift, drifting, t, f"on average over {t + 1} steps"))
    return _placed(quantity, quantity, tests, getattr(candidate, name), [math.exp(value) for value in centre])


def _place_layers(
    candidate: Deviations, floor: Sequence[Deviations], layers: Sequence[str], chance: float
) -> list[Place]:
    """The layer whose gradient is furthest out, in direction and in length. A lost gradient has no direction: its
    length tells."""
    if not layers:
        return []
    runs, steps = len(floor), len(candidate.layer_norm[layers[0]])
    turned, stretched = [], []
    bands: list[tuple[str, int, float, float]] = []
    for name in layers:
        for t in range(min(steps, *(len(run.layer_norm[name]) for run in floor))):
            logs = [math.log(max(run.layer_direction[name][t], NOTHING)) for run in floor]
            spread = max(math.sqrt(sum((x - fmean(logs)) ** 2 for x in logs) / (runs - 1)), 2 * SPREAD_OF_DISTANCES)
            out = (math.log(max(candidate.layer_direction[name][t], NOTHING) / ALLOWED) - fmean(logs)) / spread
            limit = student(1 - chance, (runs - 1) * 3)
            turned.append((out / math.sqrt(1 + 1 / runs), limit, t, f"in {name}"))
            noise = max(math.sqrt(fmean(run.layer_norm[name][t] ** 2 for run in floor)), 1e-3)
            stretched.append((abs(candidate.layer_norm[name][t]) / (noise * ALLOWED), limit, t, f"in {name}"))
            bands.append((name, t, math.exp(fmean(logs)), noise))
    found = []
    for kind, label, tests in (("direction", "gradient direction", turned), ("norm", "gradient length", stretched)):
        worst = max(range(len(tests)), key=lambda index: tests[index][0] / tests[index][1])
        name, _, middle, noise = bands[worst]
        values = getattr(candidate, f"layer_{kind}")[name]
        scale = [middle if kind == "direction" else noise] * steps
        found.append(_placed("gradient direction", f"{label}, worst layer", tests, values, scale))
    return found


def _placed(
    quantity: str,
    name: str,
    tests: Sequence[tuple[float, float, int, str]],
    values: Sequence[float],
    band: Sequence[float],
) -> Place:
    statistic, limit, t, where = max(tests, key=lambda test: test[0] / test[1])
    left = [test for test in tests if not test[0] <= test[1]]
    first = min(left, key=lambda test: test[2]) if left else None
    if first is not None:
        statistic, limit, t, where = max(
            (test for test in left if test[2] == first[2]), key=lambda test: test[0] / test[1]
        )
    what = (
        f"{name} differs by {values[t]:.2g}, {statistic:.3g} times the oracle's own noise {where} (limit {limit:.3g})"
    )
    return Place(
        quantity, name, t + 1, values[t], band[t], statistic, limit, first[2] + 1 if first is not None else None, what
    )


def _by_layer(oracle: Path, run: Path, steps: int) -> dict[str, dict[str, list[float]]]:
    turned: dict[str, list[float]] = {}
    stretched: dict[str, list[float]] = {}
    for step in range(1, steps + 1):
        ours, theirs = saved_gradients(run, step), saved_gradients(oracle, step)
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


@cache
def student(probability: float, freedom: float) -> float:
    """Quantile of Student's t, by bisection on the regularised incomplete beta function (Numerical Recipes 6.4)."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        tail = 0.5 * _beta(freedom / 2, 0.5, freedom / (freedom + middle * middle))
        low, high = (middle, high) if 1 - tail < probability else (low, middle)
    return high


def _beta(a: float, b: float, x: float) -> float:
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    """Continued fraction of the incomplete beta function, by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    total = d
    for m in range(1, 300):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + numerator * d or tiny)
            c = 1 + numerator / c or tiny
            total *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return total
