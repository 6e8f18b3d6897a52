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
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from traceforge_core.comparison.deviations import NOTHING, Deviations
from traceforge_core.comparison.parity import Parity
from traceforge_core.comparison.student import student
from traceforge_core.comparison.verdict import Finding, Place, Verdict, failed, invariant_findings
from traceforge_core.config import ComparisonConfig

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
RATIOS = {"gradient norm", "gradient length, worst layer", NAMES["moved"]}
WINDOW = 1  # steps on either side whose noise is pooled with a step's own
ROUNDING = 1e-6  # no noise is taken to be smaller: float32 itself is not finer
SPREAD_OF_DISTANCES = 0.15  # log units; a few runs of one kind may by chance be closer than the next right one
# Another right way of computing may round this many times as much as the oracle's own ways do.
ALLOWED = 1.5


def place(candidate: Deviations, floor: Sequence[Deviations], confidence: float) -> list[Place]:
    """The candidate's place in every quantity, in the order of the chain. Needs at least three runs in the floor."""
    steps = min(candidate.steps, *(run.steps for run in floor))
    chance = _chance(candidate, floor, confidence)
    rows = []
    for name, quantity in _signed(floor).items():
        rows.append(_place_signed(name, quantity, candidate, floor, steps, chance))
    for name, quantity in DISTANCES.items():
        rows.append(_place_distance(name, quantity, candidate, floor, steps, chance))
    rows += _place_layers(candidate, floor, _layers(candidate, floor), chance)
    return rows


def allowed_at_steps(candidate: Deviations, floor: Sequence[Deviations], confidence: float, name: str) -> list[float]:
    """What a quantity with a sign may differ by at each step. (Its mean over steps has a limit of its own.)"""
    limit = _student_at_step(_chance(candidate, floor, confidence), len(floor))
    return [noise * ALLOWED * limit for noise in noise_band(floor, name)]


def _signed(floor: Sequence[Deviations]) -> dict[str, str]:
    return {name: quantity for name, quantity in SIGNED.items() if all(getattr(run, name) for run in floor)}


def _layers(candidate: Deviations, floor: Sequence[Deviations]) -> list[str]:
    return [name for name in candidate.layer_norm if all(name in run.layer_norm for run in floor)]


def _chance(candidate: Deviations, floor: Sequence[Deviations], confidence: float) -> float:
    """That one test calls a right candidate wrong, so that all of them together keep the confidence."""
    steps = min(candidate.steps, *(run.steps for run in floor))
    tests = 2 * steps * (len(_signed(floor)) + len(DISTANCES))
    tests += 2 * sum(len(candidate.layer_norm[name]) for name in _layers(candidate, floor))
    return (1 - confidence) / tests


def _student_at_step(chance: float, runs: int) -> float:
    return student(1 - chance / 2, runs * (1 + 2 * WINDOW))


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
    at_step, drifting = _student_at_step(chance, runs), student(1 - chance / 2, runs)
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
    # Lengths are compared as logarithms of their ratio, and told as people would.
    differs = f"{math.expm1(values[t]):.2%}" if name in RATIOS else f"{values[t]:.2g}"
    what = f"{name} differs by {differs}, {statistic:.3g} times the oracle's own noise {where} (limit {limit:.3g})"
    return Place(
        quantity, name, t + 1, values[t], band[t], statistic, limit, first[2] + 1 if first is not None else None, what
    )
