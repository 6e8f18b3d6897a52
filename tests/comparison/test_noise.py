"""The noise floor's statistics on made-up noise: how often a right candidate is called wrong, and what a wrong one
shows."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from traceforge_core.comparison.deviations import Deviations
from traceforge_core.comparison.noise import noise_band, place
from traceforge_core.comparison.parity import Parity, StepDifference
from traceforge_core.comparison.student import student
from traceforge_core.comparison.variants import VARIANTS, usable
from traceforge_core.comparison.verdict import Place
from traceforge_core.config import ComparisonConfig

STEPS, RUNS = 6, 8
LAYERS = ("layer 0", "layer 1")


def drawn(draw: np.random.Generator, scale: float = 1.0) -> Deviations:
    """A run that differs by rounding alone: Gaussian where there is a sign, and a narrow spread of distances."""

    def signed(size: float) -> list[float]:
        return (draw.normal(0, size * scale, STEPS)).tolist()

    def distances(size: float) -> list[float]:
        return (size * scale * np.exp(draw.normal(0, 0.3, STEPS))).tolist()

    return Deviations(
        "run",
        loss=signed(2e-3),
        score_chosen=signed(1e-3),
        score_rejected=signed(1e-3),
        norm=signed(1e-3),
        direction=distances(1e-2),
        adapter=distances(5e-2),
        moved=signed(1e-2),
        layer_direction={name: distances(1e-2)[:2] for name in LAYERS},
        layer_norm={name: signed(1e-3)[:2] for name in LAYERS},
    )


def floor_of(draw: np.random.Generator) -> list[Deviations]:
    return [drawn(draw) for _ in range(RUNS)]


def left(places: list[Place]) -> list[str]:
    return [at.name for at in places if at.left_at is not None]


def test_students_quantiles_are_those_of_the_tables() -> None:
    assert student(0.975, 10) == pytest.approx(2.2281, abs=1e-4)
    assert student(0.995, 3) == pytest.approx(5.8409, abs=1e-4)
    assert student(0.9999, 6) == pytest.approx(8.0248, abs=1e-4)


def test_right_candidates_raise_fewer_alarms_than_the_confidence_allows() -> None:
    draw = np.random.default_rng(0)
    alarms = [left(place(drawn(draw), floor_of(draw), confidence=0.95)) for _ in range(300)]
    assert sum(bool(names) for names in alarms) <= 15


def test_a_candidate_that_rounds_half_as_much_again_is_still_right() -> None:
    draw = np.random.default_rng(1)
    alarms = [left(place(drawn(draw, scale=1.5), floor_of(draw), confidence=0.999)) for _ in range(300)]
    assert sum(bool(names) for names in alarms) <= 1


@pytest.mark.parametrize(
    ("change", "named", "step"),
    [
        ({"loss": [0.0, 0.0, 0.05, 0.0, 0.0, 0.0]}, "loss", 3),
        ({"score_rejected": [0.02] * STEPS}, "score rejected", 1),
        ({"norm": [-0.7] * STEPS}, "gradient norm", 1),
        ({"direction": [0.5] * STEPS}, "gradient direction", 1),
        ({"adapter": [0.05, 0.9, 0.9, 0.9, 0.9, 0.9]}, "adapter", 2),
        ({"moved": [math.log(1.3)] * STEPS}, "length of the adapter's way", 1),
        ({"layer_norm": {"layer 0": [0.0, 0.0], "layer 1": [-14.0, -14.0]}}, "gradient length, worst layer", 1),
    ],
)
def test_what_is_wrong_and_since_when_is_named(change: dict, named: str, step: int) -> None:
    draw = np.random.default_rng(2)
    places = place(replace(drawn(draw), **change), floor_of(draw), confidence=0.999)
    assert left(places) == [named]
    [at] = [at for at in places if at.left_at is not None]
    assert at.left_at == step and at.statistic > at.limit


def test_a_small_steady_error_is_found_by_its_mean_over_the_steps() -> None:
    """Each step is within its limit; all of them lean to one side."""
    draw = np.random.default_rng(3)
    found = 0
    for _ in range(50):
        floor = [replace(run, norm=draw.normal(0, 1e-3, 40).tolist()) for run in floor_of(draw)]
        floor = [
            replace(
                run,
                loss=draw.normal(0, 2e-3, 40).tolist(),
                score_chosen=draw.normal(0, 1e-3, 40).tolist(),
                score_rejected=draw.normal(0, 1e-3, 40).tolist(),
                direction=[1e-2] * 40,
                adapter=[5e-2] * 40,
                moved=draw.normal(0, 1e-2, 40).tolist(),
            )
            for run in floor
        ]
        candidate = replace(floor[0], norm=(5e-3 + draw.normal(0, 1e-3, 40)).tolist())
        found += "gradient norm" in left(place(candidate, floor[1:], confidence=0.999))
    assert found >= 45


def test_where_a_few_runs_agree_by_chance_the_band_does_not_close() -> None:
    draw = np.random.default_rng(4)
    floor = [replace(run, loss=[0.0, 0.0, *run.loss[2:]]) for run in floor_of(draw)]
    band = noise_band(floor, "loss")
    assert min(band) > 5e-4


def test_a_floor_measured_without_the_adapters_way_still_judges_the_rest() -> None:
    draw = np.random.default_rng(6)
    floor = [replace(run, moved=[]) for run in floor_of(draw)]
    places = place(replace(drawn(draw), loss=[0.05] * STEPS), floor, confidence=0.999)
    assert left(places) == ["loss"] and "length of the adapter's way" not in {at.name for at in places}


def test_nan_is_outside_every_band() -> None:
    draw = np.random.default_rng(5)
    places = place(replace(drawn(draw), loss=[float("nan")] * STEPS), floor_of(draw), confidence=0.999)
    assert "loss" in left(places)


def test_long_sequences_leave_kernels_out_that_hold_all_scores() -> None:
    assert len(usable(8, 2048, "cuda")) == len(usable(8, 65536, "cuda")) == 8
    assert all(VARIANTS[name].attention not in ("eager", "math") for name in usable(8, 65536, "cuda"))
    assert any(VARIANTS[name].attention == "eager" for name in usable(8, 2048, "cuda"))


def test_data_in_another_order_fails_whatever_the_noise() -> None:
    from traceforge_core.comparison.noise import judge_by_noise

    draw = np.random.default_rng(6)
    step = StepDifference(1, 0.0, 0.0, 0.0, 0.0, data="other pairs, or the same in another order")
    parity = Parity([step], 0.0, "a", 0.0)
    verdict = judge_by_noise(parity, place(drawn(draw), floor_of(draw), 0.999), ComparisonConfig(), RUNS)
    assert verdict.outcome == "fail" and verdict.first is not None and verdict.first.quantity == "data order"
