"""The step log: `metrics.jsonl`, one JSON object an optimizer step, the same columns for every strategy; and the
gradients of the first steps beside it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class StepRecord:
    """One optimizer step, averaged over its micro-batches and over data replicas. Numbers are never rounded.

    step: 1 for the first optimizer step. loss: the training loss. score_chosen, score_rejected: mean over the step's
    pairs of ā, the average log-probability per completion token (nats). margin: β·(score_chosen - score_rejected).
    accuracy: share of pairs with score_chosen > score_rejected. grad_norm: L2 norm before clipping.
    total_steps: how many are planned. learning_rate: the rate this step was taken with. seconds: wall time of the step.
    tokens: tokens through the model in this step, both branches. peak_memory_mib: largest allocation of any worker so
    far (CUDA allocated, or resident memory on a CPU). exchange_seconds: time spent exchanging scores and gradients (0
    for one worker).
    For the comparison: data: hash of the pairs of this step in their order, workers' hashes joined by "+" where they
    saw different pairs. scored_tokens: completion tokens that went into the step's scores, as the strategy counted.
    weights_sketch, gradient_sketch: training/sketch.py of the trained weights before this step, and of their summed
    gradients before clipping; b_sketch: of the weights of LoRA's B matrices alone, which begin at zero and may be far
    smaller than the rest. workers_apart: largest difference of a checksum of the trained weights between workers,
    relative to their size.
    SFT leaves the preference columns None.
    """

    step: int
    loss: float
    score_chosen: float | None = None
    score_rejected: float | None = None
    margin: float | None = None
    accuracy: float | None = None
    grad_norm: float | None = None
    total_steps: int | None = None
    learning_rate: float | None = None
    seconds: float | None = None
    tokens: int | None = None
    peak_memory_mib: float | None = None
    exchange_seconds: float = 0.0
    data: str | None = None
    scored_tokens: int | None = None
    weights_sketch: list[float] | None = None
    b_sketch: list[float] | None = None
    gradient_sketch: list[float] | None = None
    workers_apart: float | None = None


def append_record(path: Path, record: StepRecord) -> None:
    """Append one line and flush it, so that a killed run leaves every finished step behind."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read_records(path: Path) -> list[StepRecord]:
    """Every complete line of a step log. A torn last line (killed run) is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            break
        records.append(StepRecord(**fields))
    return records


def truncate_records(path: Path, last_step: int) -> None:
    """Drop lines after `last_step`: a resumed run repeats the steps since its checkpoint."""
    if not path.exists():
        return
    kept = [record for record in read_records(path) if record.step <= last_step]
    scratch = path.with_suffix(".tmp")
    scratch.write_text("".join(json.dumps(asdict(record)) + "\n" for record in kept), encoding="utf-8")
    scratch.replace(path)


def read_gradients(stage: Path, step: int) -> dict[str, Any] | None:
    """The summed gradients of a step before clipping, by parameter name, on the CPU; None where they were not saved."""
    from safetensors.torch import load_file

    path = stage / "gradients" / f"step-{step:05d}.safetensors"
    return load_file(path) if path.exists() else None
