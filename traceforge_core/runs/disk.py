"""Whether the disk has room for what comes next: asked before each stage, and again and again while training.

    require_room(folder, stage_bytes("oracle", config, inputs), "stage oracle")

Estimates are of what a stage will surely write, so that nothing is refused that would have fitted; a disk that fills up
all the same still ends in one clear error (`traceforge_core.runs`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError, page
from traceforge_core.training.job import TRAINING

MIB = 1 << 20
ALWAYS = 16 * MIB  # logs, manifests, plots, the monitor's CSV files
# Bytes written for a byte read, as measured: 1/13 to 1/16 in Parquet, and up to 5 for samples that repeat histories.
INGEST_SHARE, DATASETS_SHARE = 1 / 16, 2


def require_room(folder: Path, needed: int, what: str, then: str = "run it again; finished stages are kept") -> None:
    """Raise TraceForgeError where the disk of `folder` has less than `needed` bytes left. `what` needs them; `then` is
    what to do when there is room."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise TraceForgeError(
            f"Too little disk space: {what} needs about {in_units(needed)}, and {folder} has {in_units(free)} left. "
            f"Free {in_units(needed - free)} or more (`traceforge runs` shows what old runs take) and {then}. "
            f"{page('disk-full')}"
        )


def stage_bytes(stage: str, config: RunConfig, inputs: Mapping[str, Path]) -> int:
    """Bytes that a stage will write at least, at its fullest. `inputs`: the folders of the stages it works from."""
    if stage == "ingest":
        from traceforge_core.trajectories.ingest import corpus_folder

        return ALWAYS + int(INGEST_SHARE * tree_bytes(corpus_folder(config.ingest.path)))
    if stage == "datasets":
        return ALWAYS + DATASETS_SHARE * tree_bytes(inputs["ingest"])
    if stage in TRAINING:
        kept = 0 if stage == "sft" else config.comparison.gradient_steps
        adapter = adapter_bytes(config, inputs["model"])
        return ALWAYS + (1 + kept) * adapter + 2 * checkpoint_bytes(adapter)  # the new one before the old one goes
    return ALWAYS


def adapter_bytes(config: RunConfig, model_dir: Path) -> int:
    """Size of a float32 adapter of the run's model; 0 where the model's dimensions cannot be read."""
    from traceforge_core.longcontext.planner import read_dimensions

    try:
        named = json.loads((model_dir / "model.json").read_text(encoding="utf-8"))["weights"]
        beside = model_dir / named
        dims = read_dimensions(str(beside) if beside.is_dir() else named)
    except (OSError, ValueError, KeyError, TraceForgeError):
        return 0
    return 4 * dims.adapter(config.model.lora.r, tuple(config.model.lora.targets))


def checkpoint_bytes(adapter: int) -> int:
    """A checkpoint: the adapter, and two numbers of the optimizer for each of its own."""
    return 3 * adapter


def tree_bytes(path: Path) -> int:
    """Bytes of the files below a path, or of the file itself."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def in_units(count: float) -> str:
    """A number of bytes for people: 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
