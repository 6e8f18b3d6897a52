"""The shared-prefix strategy and tiled layers with real workers: what they compute is what TRL computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from traceforge_core.comparison.compare import compare
from traceforge_core.comparison.parity import measure
from traceforge_core.config import RunConfig
from traceforge_core.training import stages


@pytest.mark.slow
def test_shared_prefix_and_tiled_branches_agree_with_the_oracle_in_float32(
    inputs: dict[str, Path], configure: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = configure(
        comparison__gradient_steps=6,
        preference__long_context="on",
        preference__cpo_alpha=0.3,
        preference__batch_size=2,
        preference__evaluate=True,
        long_context__tile=7,
    )
    stages.train_oracle(config, inputs, tmp_path / "oracle")
    shared = stages.train_shared_prefix(config, inputs, tmp_path / "shared_prefix")
    tiled = stages.train_branch_parallel(config, inputs, tmp_path / "branch_parallel")
    assert shared["workers"] == 1 and tiled["workers"] == 2
    for name in ("shared_prefix", "branch_parallel"):
        assert "every sequence is computed in tiles" in (tmp_path / name / "logs" / "rank0.log").read_text()
        parity = measure(tmp_path / "oracle", tmp_path / name)
        assert parity.unequal == []
        assert parity.gradient_steps == 6
        assert parity.max_loss <= 1e-6
        assert parity.max_gradient is not None and parity.max_gradient <= 1e-5
        assert parity.adapter <= 1e-5
    assert "tiles" not in (tmp_path / "oracle" / "logs" / "rank0.log").read_text()

    (tmp_path / "compare").mkdir()
    result = compare(
        config,
        {name: tmp_path / name for name in ("oracle", "branch_parallel", "shared_prefix")},
        tmp_path / "compare",
    )
    assert result["verdict"] == "pass" and result["shared_prefix"]["verdict"] == "pass"


@pytest.mark.slow
def test_two_shared_prefix_workers_take_pairs_each_and_equal_the_oracle(
    inputs: dict[str, Path], configure: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = configure(comparison__gradient_steps=6, preference__replicas=2)
    stages.train_oracle(config, inputs, tmp_path / "oracle")
    figures = stages.train_shared_prefix(config, inputs, tmp_path / "shared_prefix")
    assert figures["workers"] == 2
    parity = measure(tmp_path / "oracle", tmp_path / "shared_prefix")
    assert parity.max_loss <= 1e-6 and parity.adapter <= 1e-5


@pytest.mark.slow
def test_sft_through_tiled_layers_takes_the_same_steps(
    inputs: dict[str, Path], configure: Callable[..., RunConfig], tmp_path: Path
) -> None:
    plain = stages.train_sft(configure(sft__long_context="off"), inputs, tmp_path / "plain")
    tiled = stages.train_sft(configure(sft__long_context="on"), inputs, tmp_path / "tiled")
    assert tiled["last_loss"] == pytest.approx(plain["last_loss"], rel=1e-5)
    assert "every sequence is computed in tiles" in (tmp_path / "tiled" / "logs" / "rank0.log").read_text()
