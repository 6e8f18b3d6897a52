"""Every way in which the oracle is run against itself computes the oracle's function: else its noise hides bugs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from traceforge_core.comparison.parity import measure
from traceforge_core.comparison.rounding import WAYS, read_rounding, rounding_of, write_rounding
from traceforge_core.comparison.series import run_series
from traceforge_core.comparison.tolerances import judge_exactly
from traceforge_core.comparison.variants import AGAIN, VARIANTS
from traceforge_core.config import RunConfig, lay_over
from traceforge_core.training.stages import oracle_job

ONE_STEP = [
    "preference.batch_size=2",  # so that rows are padded to each other, and there is more than one at a time
    "preference.gradient_accumulation=2",
    "comparison.oracle_steps=1",
    "comparison.gradient_steps=1",
]


@pytest.mark.slow
def test_in_float32_every_way_gives_the_oracles_scores_loss_gradients_and_step(
    short: RunConfig, inputs: dict[str, Path], tmp_path: Path
) -> None:
    config = lay_over(short, assignments=ONE_STEP)
    base = replace(oracle_job(config, inputs, tmp_path), held_out=None)
    names = ["oracle", AGAIN, *VARIANTS]
    jobs = {name: replace(base, out_dir=tmp_path / f"{number:02d}") for number, name in enumerate(names)}
    stopped = run_series(jobs, tmp_path, variants={name: name for name in names[1:]}, last_step=1)
    assert set(stopped.values()) == {None}
    found = {name: measure(jobs["oracle"].out_dir, jobs[name].out_dir) for name in names[1:]}
    verdicts = {name: judge_exactly(parity, config.comparison) for name, parity in found.items()}
    assert {name: told.reasons[0] for name, told in verdicts.items() if told.outcome != "pass"} == {}
    assert found[AGAIN].max_loss == found[AGAIN].max_gradient == 0.0
    # What rounding does to single gradients is what these differ by, a parameter at a time.
    rounding = rounding_of(jobs["oracle"].out_dir, [jobs[name].out_dir for name in WAYS.values()])
    write_rounding(rounding, tmp_path)
    assert read_rounding(tmp_path) == rounding and list(rounding) == [1]
    largest = max(rounding[1].values())
    assert largest == pytest.approx(max(found[name].steps[0].direction or 0.0 for name in WAYS.values()))
    assert 0 < largest < 1e-5
    assert sum(parity.max_gradient != 0.0 for parity in found.values()) >= 6, "they do round in other ways"
