"""Mistakes that nobody put into the registry of faults: the comparison finds those too, and points at them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.comparison import other_mistakes
from traceforge_core.comparison.parity import measure
from traceforge_core.comparison.series import run_series
from traceforge_core.comparison.tolerances import judge_exactly
from traceforge_core.config import RunConfig, lay_over
from traceforge_core.training.job import Kind
from traceforge_core.training.stages import preference_job

# Two pairs a batch, two batches a step, every term of the loss, and all gradients clipped.
SETTINGS = [
    "preference.batch_size=2",
    "preference.gradient_accumulation=2",
    "preference.cpo_alpha=0.5",
    "preference.label_smoothing=0.1",
    "preference.max_grad_norm=1e-3",
]


def mistakes(strategy: str) -> dict[str, type]:
    found = {name: one for name, one in vars(other_mistakes).items() if hasattr(one, "points_at")}
    return {name: one for name, one in found.items() if one.__mro__[1].__name__.lower().startswith(strategy)}


@pytest.mark.slow
@pytest.mark.timeout(600)  # nineteen trainings, on a machine that may have much else to do
def test_mistakes_that_are_in_no_list_are_found_and_pointed_at(
    short: RunConfig, inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = lay_over(short, assignments=SETTINGS)
    oracle = replace(preference_job("oracle", config, inputs, tmp_path / "oracle" / "run"), cut_to=384)
    run_series({"oracle": oracle}, tmp_path / "oracle")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    wrongly, all_of_them = {}, 0
    kinds: dict[Kind, str] = {"branch_parallel": "branchparallel", "shared_prefix": "sharedprefix"}
    for kind, begins in kinds.items():
        clean = replace(preference_job(kind, config, inputs, tmp_path / kind / "clean"), cut_to=384)
        planted = mistakes(begins)
        jobs = {"clean": clean} | {
            name: replace(clean, out_dir=tmp_path / kind / name, trainer=f"other_mistakes:{name}") for name in planted
        }
        assert set(run_series(jobs, tmp_path / kind).values()) == {None}
        for name, job in jobs.items():
            verdict = judge_exactly(measure(oracle.out_dir, job.out_dir), config.comparison)
            pointed_at = verdict.first.quantity if verdict.first else None
            if pointed_at not in (planted[name].points_at if name != "clean" else (None,)):  # type: ignore[attr-defined]
                wrongly[f"{kind}: {name}"] = verdict.reasons[0]
        all_of_them += len(planted)
    assert wrongly == {}
    assert all_of_them == 16
