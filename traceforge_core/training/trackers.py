"""Experiment trackers beside the step log: TensorBoard, Weights & Biases, trackio, MLflow, as `report_to` names them.

What they write lies in `trackers/` of the run, all stages side by side, and nothing leaves the machine unless the
tracker's own environment variables say so (WANDB_API_KEY or WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID):

    tensorboard --logdir runs/X/trackers/tensorboard
    wandb sync runs/X/trackers/wandb/offline-run-*
    TRACKIO_DIR=runs/X/trackers/trackio trackio show
    mlflow ui --backend-store-uri sqlite:///runs/X/trackers/mlflow.db

It is not in the stage's own folder: looking at it with the tracker's programs changes files, and a stage whose files
changed would be done again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import netrc
import os
import shutil
from pathlib import Path

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.training.job import Job

FOLDER = "trackers"


def require_trackers(config: RunConfig) -> None:
    """Raise TraceForgeError where a tracker is named whose package is not installed. Loads none of them."""
    for section in ("sft", "preference"):
        for name in getattr(config, section).report_to:
            if importlib.util.find_spec(name) is None:
                raise TraceForgeError(
                    f"{section}.report_to names {name}, whose package is not installed here. Install it with "
                    f"pip install {name} (or pip install -e '.[{name}]' in a checkout), or take {name} out of "
                    f"{section}.report_to; metrics.jsonl has every step in any case."
                )


def settle_trackers(job: Job, *, goes_on: bool) -> str:
    """In a worker, before its trainer is made: say where trackers write, unless the environment says so already.
    `goes_on`: there is a checkpoint, so what was tracked before stays. Returns the name of the tracker's run."""
    folder = job.run_folder / FOLDER
    name = job.label
    board = folder / "tensorboard" / name
    if "tensorboard" in job.section.report_to and not goes_on:
        shutil.rmtree(board, ignore_errors=True)
    if job.section.report_to:
        folder.mkdir(parents=True, exist_ok=True)
    for variable, value in {
        "TENSORBOARD_LOGGING_DIR": str(board),
        "WANDB_DIR": str(folder),
        "WANDB_PROJECT": "traceforge",
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "MLFLOW_EXPERIMENT_NAME": "traceforge",
    }.items():
        os.environ.setdefault(variable, value)
    if not _has_wandb_key():  # it would ask for one, and nobody would answer
        os.environ.setdefault("WANDB_MODE", "offline")
    return f"{job.run_folder.name}/{name}"


def finish_trackers(job: Job, rank: int) -> None:
    """Have the job's trackers write what they still hold: a worker leaves without the usual end of a Python process.
    Only rank 0 has any."""
    if rank != 0:
        return
    if "wandb" in job.section.report_to:
        import wandb

        wandb.finish()
    if "trackio" in job.section.report_to:
        import trackio

        with contextlib.suppress(RuntimeError):  # it is finished already
            trackio.finish()
    if "mlflow" in job.section.report_to:
        import mlflow

        mlflow.flush_async_logging()
        mlflow.end_run()


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        hosts = netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").hosts
        return any("wandb" in host for host in hosts)
    return False
