"""The page of what the comparison catches, and the README's table, are made from results that show what they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from detection_page import (
    CLEAN,
    DTYPES,
    RESULTS,
    STRATEGIES,
    TRAINED,
    Result,
    decisive,
    page,
    read_results,
    with_summary,
)

from traceforge_core.comparison.faults.registry import FAULTS, faults_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return read_results(RESULTS)


def test_page_and_readme_are_what_the_results_give(results: dict[str, Result]) -> None:
    assert (ROOT / "docs" / "detection.md").read_text(encoding="utf-8") == page(results)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert with_summary(readme, results) == readme


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_fault_was_planted_and_caught_and_clean_runs_raised_no_alarm(
    dtype: str, strategy: str, results: dict[str, Result]
) -> None:
    found = results[dtype]["strategies"][strategy]
    told = {row["fault"]: decisive(row)["outcome"] for row in found["faults"]}
    assert set(told) == {CLEAN, *(fault.name for fault in faults_of(strategy))}
    assert told.pop(CLEAN) == "pass"
    assert set(told.values()) <= {"fail", "stopped"}
    assert found.get("clean", {}).get("alarms", []) == []
    assert found["clean"]["runs"] >= 10


def test_on_trained_weights_every_fault_is_caught_and_pointed_at_and_the_clean_run_passes(
    results: dict[str, Result],
) -> None:
    for strategy, found in results[f"{TRAINED}, float32, CPU"]["strategies"].items():
        told = {row["fault"]: row for row in found["faults"]}
        assert set(told) == {CLEAN, *(fault.name for fault in faults_of(strategy))}
        assert told.pop(CLEAN)["outcome"] == "pass"
        for fault, row in told.items():
            assert row["outcome"] == "stopped" or row["points_at"] in FAULTS[fault].points_at
