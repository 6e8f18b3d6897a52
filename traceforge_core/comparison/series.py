"""Many short trainings in the same worker processes: what a training takes on a small model is mostly starting up.

    failures = run_series({"clean": job, "mean_of_gradients": replace(job, planted_fault=..., out_dir=...)}, folder)

All jobs must need the same workers and the same model. The base model is loaded once; every job gets its own start
adapter, trainer and outputs in its own folder, as if it had been launched alone.
"""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import write_json
from traceforge_core.training.job import Job
from traceforge_core.training.launch import OnLine, launch
from traceforge_core.training.seats import seats

logger = logging.getLogger(__name__)
LIST = "series.json"


def run_series(
    jobs: Mapping[str, Job],
    out_dir: Path,
    *,
    variants: Mapping[str, str] | None = None,
    last_step: int | None = None,
    share_gpu: bool = False,
    on_line: OnLine | None = None,
) -> dict[str, str | None]:
    """Train every job, one after the other. For each: None, or the message with which its workers refused to go on.

    `variants`: for a job, which of variants.VARIANTS its oracle computes in (variants.AGAIN: as it is); it ends after
    `last_step`. Logs and the list of jobs lie in `out_dir`, a job's outputs in its own folder. Raises ValueError where
    the jobs do not fit together, and whatever `launch` raises where a worker itself ends badly.
    """
    first = next(iter(jobs.values()))
    for name, job in jobs.items():
        if (job.branches, job.replicas, job.model_dir, job.device, job.backend, job.config.model) != (
            first.branches, first.replicas, first.model_dir, first.device, first.backend, first.config.model,
        ):  # fmt: skip
            raise ValueError(f"{name} needs other workers, or another model, than {next(iter(jobs))}")
        job.out_dir.mkdir(parents=True, exist_ok=True)
        job.write(job.out_dir / "job.json")
    out_dir.mkdir(parents=True, exist_ok=True)
    ways = variants or {}
    listed = [
        {"name": name, "job": job.out_dir / "job.json", "variant": ways.get(name), "last_step": last_step}
        for name, job in jobs.items()
    ]
    write_json(out_dir / LIST, listed)
    carrier = replace(first, kind="series", trainer=f"{__name__}:train_all", out_dir=out_dir, planted_fault=None)
    launch(carrier, seats(carrier, share_gpu=share_gpu), on_line=on_line)
    return {name: _failure(job) for name, job in jobs.items()}


def train_all(carrier: Job, mesh: Any, beat: Callable[[str], None]) -> None:
    """In a worker: every job of the list beside the carrier's job file."""
    from importlib import import_module

    from traceforge_core.training.preference import train

    loaded = _Loaded()
    listed = json.loads((carrier.out_dir / LIST).read_text(encoding="utf-8"))
    for number, entry in enumerate(listed, 1):
        job = Job.read(Path(entry["job"]))
        logger.info("Series: %s", entry["name"])
        module, _, class_name = job.trainer.partition(":")
        trainer_class = getattr(import_module(module), class_name)
        if entry["variant"] is not None:
            from traceforge_core.comparison.variants import VARIANTS, Variant, vary

            trainer_class = vary(trainer_class, VARIANTS.get(entry["variant"], Variant()), entry["last_step"])
        try:
            train(job, mesh, trainer_class, _counting(beat, number, len(listed)), loaded.load)
        except Exception as error:
            # What is found from figures that all workers have, all of them raise; else the others would wait for ever.
            if mesh.size > 1 and not isinstance(error, TraceForgeError):
                raise
            logger.info("%s was stopped: %s", entry["name"], error)
            if mesh.rank == 0:
                write_json(job.out_dir / "stopped.json", {"message": str(error)})
        loaded.put_back()
        gc.collect()


def _counting(beat: Callable[[str], None], number: int, runs: int) -> Callable[[str], None]:
    """Signs of life that say which run they are of."""
    return lambda doing: beat(f"{doing} (run {number} of {runs})")


class _Loaded:
    """`load_model` that keeps the base model, and gives it the adapter that a fresh load would have."""

    def __init__(self) -> None:
        self._model: Any = None
        self._tokenizer: Any = None
        self._forward: Any = None
        self._attention: str | None = None

    def load(self, model_dir: Path, config: Any, *, adapter: Path | None, seed: int, **options: Any) -> tuple[Any, Any]:
        from traceforge_core.modeling.loading import draw_adapter, fill_adapter, load_model

        if self._model is None:
            self._model, self._tokenizer = load_model(model_dir, config, adapter=adapter, seed=seed, **options)
            self._forward = self._model.__dict__.get("forward")
            self._attention = self._model.config._attn_implementation
        elif adapter is not None:
            fill_adapter(self._model, adapter)
        else:
            draw_adapter(self._model, seed)
        return self._model, self._tokenizer

    def put_back(self) -> None:
        """Undo what a trainer does to a model: gradients, attention, and the forward that accelerate wraps in autocast
        (marked as prepared, the model would go on without it)."""
        model = self._model
        if model is None:  # the job was stopped before it needed one
            return
        model.zero_grad(set_to_none=True)
        for name in ("forward", "_original_forward", "_is_accelerate_prepared"):
            model.__dict__.pop(name, None)
        if self._forward is not None:
            model.forward = self._forward
        if model.config._attn_implementation != self._attention:
            model.set_attn_implementation(self._attention)


def _failure(job: Job) -> str | None:
    try:
        content: str | None = json.loads((job.out_dir / "stopped.json").read_text(encoding="utf-8"))["message"]
        return content
    except OSError:
        return None
