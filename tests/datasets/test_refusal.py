"""Datasets with nothing to train on are refused, with the reason and the setting that would change it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.datasets.test_build import Make, build
from traceforge_core.errors import TraceForgeError
from traceforge_core.trajectories.model import Trajectory


def test_no_pairs_at_all_says_why_and_what_to_do(
    make_run: Make, ingested: Callable[[list[Trajectory]], Path], model_dir: Path, tmp_path: Path
) -> None:
    folder = ingested([make_run("c", run, [("ls", 0)]) for run in "ab"])
    with pytest.raises(TraceForgeError) as error:
        build(folder, model_dir, tmp_path / "out")
    for part in ("0 resolved, 0 unresolved, 2 without a label", "outcome: 0, recovery: 0", "ingest.outcomes"):
        assert part in str(error.value)


def test_pairs_that_are_all_too_long_say_so(corpus: Path, model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceForgeError, match=r"too long: 16.*datasets\.preference\.max_length"):
        build(corpus, model_dir, tmp_path / "out", "datasets.preference.max_length=20")


def test_pairs_that_are_all_held_out_say_so(
    make_run: Make, ingested: Callable[[list[Trajectory]], Path], model_dir: Path, tmp_path: Path
) -> None:
    runs = [make_run(f"c{n}", "a", [("ls", 0)]) for n in range(3)]
    for seed in range(20):  # some seed holds out the one case that has a pair
        for n in range(3):
            pair = [make_run(f"c{n}", "b", [("sed a", 1), ("sed b", 0)])]
            try:
                folder = tmp_path / f"{seed}-{n}"
                folder.mkdir()
                build(ingested(runs + pair), model_dir, folder / "out", f"datasets.split.seed={seed}")
            except TraceForgeError as error:
                assert "All 1 preference pairs belong to held-out cases" in str(error)
                assert "datasets.split.held_out" in str(error)
                return
    pytest.fail("no seed held the pair out")


@pytest.mark.parametrize("assignment", ["datasets.sft.outcomes=resolved", "datasets.sft.max_length=10"])
def test_no_samples_at_all_says_what_to_change(
    make_run: Make,
    ingested: Callable[[list[Trajectory]], Path],
    model_dir: Path,
    tmp_path: Path,
    assignment: str,
) -> None:
    folder = ingested([make_run("c", "a", [("sed a", 1), ("sed b", 0)])])
    with pytest.raises(TraceForgeError, match=assignment.partition("=")[0].replace(".", r"\.")):
        build(folder, model_dir, tmp_path / "out", assignment)
