"""The tiny preset on the shipped samples up to the SFT adapter, made once: what strategies are compared on here."""

from __future__ import annotations

from pathlib import Path

import pytest

from traceforge_core.config import RunConfig, load_config
from traceforge_core.runs import Run
from traceforge_core.stages import perform

# Short pairs and three steps (a wrong optimizer shows in the third) keep some 45 trainings within a few minutes.
SHORT = [
    "preference.max_steps=3",
    "comparison.oracle_max_length=384",
    "comparison.oracle_steps=3",
    "comparison.gradient_steps=3",
    "comparison.noise_steps=3",
    "comparison.noise_runs=6",
]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers compute with one thread each: reproducible, and the machine is shared."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def short() -> RunConfig:
    return load_config(assignments=SHORT)


@pytest.fixture(scope="session")
def short_bfloat16() -> RunConfig:
    return load_config(assignments=[*SHORT, "model.dtype=bfloat16"])


@pytest.fixture(scope="session")
def trained_run(short: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with the stages before the preference strategies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        run = Run.create(tmp_path_factory.mktemp("runs"))
        run.save_config(short.model_dump(mode="json"))
        for name in ("ingest", "model", "datasets", "sft"):
            perform(name, short, run)
    return run


@pytest.fixture(scope="session")
def inputs(trained_run: Run) -> dict[str, Path]:
    return {name: trained_run.stage_dir(name) for name in ("model", "datasets", "sft")}
