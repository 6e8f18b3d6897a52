"""What cannot fit is refused before anything is loaded, on a GPU that is only pretended."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.training import fit
from traceforge_core.training.job import Kind
from traceforge_core.training.stages import preference_job, require_trainings

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


@pytest.mark.parametrize("kind", ["branch_parallel", "shared_prefix"])
def test_a_batch_that_does_not_fit_where_its_samples_would_is_refused_with_the_same_step_in_single_samples(
    kind: Kind, inputs: dict[str, Path], configure: Configure, tmp_path: Path, gpus: list[SimpleNamespace]
) -> None:
    """The layers lay a batch's rows end to end, so that it takes the memory of one sample as long as all of them."""
    settings = {"preference__batch_size": 4, "preference__gradient_accumulation": 2, "preference__long_context": "on"}
    job = replace(preference_job(kind, configure(**settings), inputs, tmp_path), device="cuda")
    one, four = fit.longest_work(job), fit.longest_work(job, 4)
    assert one.tokens < four.tokens <= 4 * one.tokens
    said = []
    for step in range(1, 600):
        gpus[0].memory_total_mib = step / 20  # MiB
        try:
            fit.require_fit(job)
            said.append("fits")
        except TraceForgeError as error:
            single = "Set preference.batch_size=1 preference.gradient_accumulation=8: the same step" in str(error)
            said.append("single" if single else "refused")
    assert said == sorted(said, key=["refused", "single", "fits"].index)
    assert set(said) == {"refused", "single", "fits"}


def test_auto_takes_the_shared_prefix_on_gpus_and_branches_where_nothing_can_be_planned(
    inputs: dict[str, Path], configure: Configure, gpus: list[SimpleNamespace], tmp_path: Path
) -> None:
    weights = str(inputs["model"] / "weights")
    auto = configure(preference__strategy="auto", model__name=weights, model__device="auto")
    assert fit.resolve_strategy(auto) == "shared_prefix"
    assert fit.resolve_strategy(configure(preference__strategy="auto")) == "branch_parallel"
    assert fit.resolve_strategy(configure(preference__strategy="shared_prefix")) == "shared_prefix"
    (tmp_path / "config.json").write_text(json.dumps({}))
    named = configure(preference__strategy="auto", model__name=str(tmp_path), model__device="auto")
    assert fit.resolve_strategy(named) == "branch_parallel"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, "sliding window only (64 tokens)"),
        ({"model_type": "gemma2"}, "this model's is gemma2"),
    ],
)
def test_auto_says_why_a_model_cannot_share_a_prefix_and_takes_branches(
    inputs: dict[str, Path], configure: Configure, gpus: list[SimpleNamespace], tmp_path: Path,
    caplog: pytest.LogCaptureFixture, changed: dict[str, Any], told: str,
) -> None:  # fmt: skip
    config = json.loads((inputs["model"] / "weights" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with caplog.at_level("INFO"):
        auto = configure(preference__strategy="auto", model__name=str(tmp_path), model__device="auto")
        assert fit.resolve_strategy(auto) == "branch_parallel"
    assert "Strategy: branch_parallel (" in caplog.text and told in caplog.text


@pytest.mark.parametrize(
    ("kind", "changed", "settings", "told"),
    [
        ("shared_prefix", {"model_type": "mistral", "sliding_window": 64}, {}, r"sliding window only \(64 tokens\)"),
        ("shared_prefix", {"model_type": "gemma2"}, {}, "this model's is gemma2"),
        ("branch_parallel", {"rope_scaling": {"type": "dynamic"}}, {}, "rope_type dynamic"),
        ("branch_parallel", {"model_type": "gemma2"}, {"preference__long_context": "on"}, "this model's is gemma2"),
        ("branch_parallel", {"model_type": "gemma2"}, {}, None),
        ("sft", {"model_type": "gemma2"}, {"sft__long_context": "on"}, "this model's is gemma2"),
        ("sft", {"rope_scaling": {"type": "dynamic"}}, {"sft__long_context": "on"}, None),
    ],
)
def test_a_model_that_a_strategy_cannot_compute_is_refused_before_the_first_training(
    inputs: dict[str, Path], configure: Configure, tmp_path: Path,
    kind: str, changed: dict[str, Any], settings: dict[str, Any], told: str | None,
) -> None:  # fmt: skip
    config = json.loads((inputs["model"] / "weights" / "config.json").read_text())
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps(config | {"rope_parameters": None} | changed))
    (tmp_path / "model.json").write_text(json.dumps({"weights": "weights"}))
    with pytest.raises(TraceForgeError, match=told) if told else contextlib.nullcontext():
        require_trainings([kind, "oracle", "evaluate"], configure(**settings), tmp_path, inputs["datasets"])


def test_too_little_host_memory_for_all_workers_is_refused_naming_what_helps(
    inputs: dict[str, Path], configure: Configure, tmp_path: Path, gpus: list[SimpleNamespace],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    job = preference_job("shared_prefix", configure(), inputs, tmp_path)
    on_gpu = replace(job, device="cuda")
    work = fit.longest_work(on_gpu)
    assert work is not None
    needed = 2 * 4 * work.tokens * 32  # two layers' inputs in float32, 32 numbers a token
    monkeypatch.setattr(fit, "usable_memory", lambda: needed)
    fit.require_fit(on_gpu)
    monkeypatch.setattr(fit, "usable_memory", lambda: needed - 1)
    with pytest.raises(TraceForgeError, match=r"long_context\.inputs_on_device=1"):
        fit.require_fit(on_gpu)
    monkeypatch.setattr(fit, "usable_memory", lambda: needed)
    with pytest.raises(TraceForgeError, match="host memory"):
        fit.require_fit(replace(on_gpu, replicas=2))
