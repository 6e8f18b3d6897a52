"""A disk that fills up while a stage trains: seen before it hurts, and gone on from afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs.disk import (
    ALWAYS,
    adapter_bytes,
    checkpoint_bytes,
    in_units,
    require_room,
    stage_bytes,
    tree_bytes,
)
from traceforge_core.training import stages

Configure = Callable[..., RunConfig]


@pytest.mark.slow
def test_training_stops_while_a_checkpoint_still_fits_and_goes_on_when_there_is_room(
    small_disk: Path, inputs: dict[str, Path], configure: Configure
) -> None:
    others = small_disk / "others"

    def fill(_rank: int, line: str) -> None:
        if "step 4/" in line and not others.exists():
            others.write_bytes(bytes(24 << 20))

    long = configure(sft__max_steps=4000, sft__schedule="constant", sft__checkpoint_steps=2)
    job = stages.sft_job(long, inputs, small_disk / "out")
    with pytest.raises(TraceForgeError, match=r"sft was stopped, because its next checkpoint needs about 16\.\d MiB"):
        stages.run_job(job, on_line=fill)
    assert not (job.out_dir / "adapter").exists()
    [kept] = (job.out_dir / "checkpoints").glob("checkpoint-*")
    others.unlink()

    steps = int(kept.name.rpartition("-")[2])
    short = configure(sft__max_steps=steps + 2, sft__schedule="constant", sft__checkpoint_steps=2)
    stages.run_job(stages.sft_job(short, inputs, small_disk / "out"))
    assert json.loads((job.out_dir / "training.json").read_text())["resumed_from"] == kept.name


@pytest.mark.slow
def test_what_training_is_estimated_to_write_is_what_it_writes(
    inputs: dict[str, Path], configure: Configure, tmp_path: Path
) -> None:
    config = configure(comparison__gradient_steps=5)
    largest: dict[str, int] = {}

    def look(_rank: int, _line: str) -> None:
        for checkpoint in (tmp_path / "out" / "checkpoints").glob("checkpoint-*"):
            largest[checkpoint.name] = tree_bytes(checkpoint / "optimizer.pt") if checkpoint.is_dir() else 0

    stages.run_job(stages.preference_job("oracle", config, inputs, tmp_path / "out"), on_line=look)
    adapter = adapter_bytes(config, inputs["model"])
    weights = tree_bytes(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert adapter == pytest.approx(weights, rel=0.35) and adapter <= weights, "the file has a header too"
    assert largest and checkpoint_bytes(adapter) <= max(largest.values()) + weights
    assert (1 + 5) * adapter <= tree_bytes(tmp_path / "out" / "gradients") + weights
    assert stage_bytes("oracle", config, inputs) == ALWAYS + (1 + 5 + 2 * 3) * adapter


def test_too_little_room_says_how_much_more_is_needed(tmp_path: Path) -> None:
    require_room(tmp_path, 1, "stage sft")
    with pytest.raises(TraceForgeError, match=r"stage sft needs about 1024.0 TiB, and .* left\. Free .* TiB or more"):
        require_room(tmp_path, 1 << 50, "stage sft")


def test_ingest_is_estimated_by_its_corpus_and_a_model_nobody_knows_by_nothing(
    configure: Configure, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.json").write_bytes(bytes(16 << 20))
    config: Any = configure(ingest__path=str(tmp_path / "logs"))
    assert stage_bytes("ingest", config, {}) == ALWAYS + (1 << 20)
    assert adapter_bytes(config, tmp_path) == 0


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 bytes"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5 << 41, "10.0 TiB")]
)
def test_sizes_are_told_for_people(count: int, told: str) -> None:
    assert in_units(count) == told
