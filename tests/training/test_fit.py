"""What cannot fit is refused before anything is loaded, on a GPU that is only pretended."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.training import fit
from traceforge_core.training.stages import preference_job

Configure = Callable[..., RunConfig]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    found = [SimpleNamespace(name="NVIDIA H200", memory_total_mib=24 * 1024)] * 2
    monkeypatch.setattr(fit, "read_gpus", lambda: (found, None))
    monkeypatch.setattr(fit, "usable_gpus", lambda gpus: gpus)
    return found


def test_a_pair_that_cannot_fit_is_refused_and_one_that_can_is_not(
    inputs: dict[str, Path], configure: Configure, tmp_path: Path, gpus: list[SimpleNamespace]
) -> None:
    job = preference_job("shared_prefix", configure(), inputs, tmp_path)
    fit.require_fit(job)
    on_gpu = replace(job, device="cuda")
    fit.require_fit(on_gpu)
    gpus[0].memory_total_mib = 1
    fit.require_fit(job)
    with pytest.raises(TraceForgeError, match=r"as shared_prefix need .* GiB of GPU memory"):
        fit.require_fit(on_gpu)


def test_auto_takes_the_shared_prefix_on_gpus_and_branches_where_nothing_can_be_planned(
    inputs: dict[str, Path], configure: Configure, gpus: list[SimpleNamespace], tmp_path: Path
) -> None:
    weights = str(inputs["model"] / "weights")
    auto = configure(preference__strategy="auto", model__name=weights, model__device="auto")
    assert fit.resolve_strategy(auto) == "shared_prefix"
    assert fit.resolve_strategy(configure(preference__strategy="auto")) == "branch_parallel"
    assert fit.resolve_strategy(configure(preference__strategy="shared_prefix")) == "shared_prefix"
    (tmp_path / "config.json").write_text(json.dumps({}))
    unreadable = configure(preference__strategy="auto", model__name=str(tmp_path), model__device="auto")
    assert fit.resolve_strategy(unreadable) == "branch_parallel"
