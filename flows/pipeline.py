"""The one flow: every deployment, the nightly one included, is this flow with other parameters.

    traceforge(run="new", runs_dir="runs")                       # a full run with the default preset
    traceforge(stages=["compare"], run="latest")                 # one stage again, on the newest run's outputs

Stages run one after the other in the main thread, so that a cancellation or Ctrl-C reaches them; only the monitor is
submitted, and stopped in `finally`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from prefect import flow, runtime
from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger
from prefect.states import Cancelled, State
from prefect.tasks import MaterializingTask
from pydantic import BeforeValidator, Field

from flows.gpus import gpus_held, gpus_needed
from flows.leftover import mark_crashed
from flows.session import Session, begin, last_session, ordered
from flows.summary import as_markdown, key_figures, summarise, why_not
from tasks.assets import with_lineage
from tasks.branch_parallel import branch_parallel
from tasks.compare import compare
from tasks.datasets import datasets
from tasks.evaluate import evaluate
from tasks.history import add_to_history
from tasks.ingest import ingest
from tasks.model import model
from tasks.monitor import monitor
from tasks.noise_floor import noise_floor
from tasks.oracle import oracle
from tasks.performing import logs_to
from tasks.planted_faults import planted_faults
from tasks.sft import sft
from tasks.shared_prefix import shared_prefix
from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.monitoring.host import descendants
from traceforge_core.paths import written
from traceforge_core.runs import Run, StageResult
from traceforge_core.runs.folder import RunInUse
from traceforge_core.runs.stopping import StoppedByFile
from traceforge_core.stages import IN_WORKERS, STAGES
from traceforge_core.start_check import check_start, check_trainings
from traceforge_core.training.trackers import require_trackers
from traceforge_core.trajectories.ingest import refuse_nothing_read

log = logging.getLogger(__name__)

STAGE_TASKS: dict[str, MaterializingTask[..., State[StageResult]]] = {
    "ingest": ingest,
    "model": model,
    "datasets": datasets,
    "sft": sft,
    "oracle": oracle,
    "branch_parallel": branch_parallel,
    "shared_prefix": shared_prefix,
    "noise_floor": noise_floor,
    "planted_faults": planted_faults,
    "evaluate": evaluate,
    "compare": compare,
}
MONITOR_END_SECONDS = 30.0

StageName = Annotated[
    Literal[
        "ingest",
        "model",
        "datasets",
        "sft",
        "oracle",
        "branch_parallel",
        "shared_prefix",
        "noise_floor",
        "planted_faults",
        "evaluate",
        "compare",
    ],
    BeforeValidator(lambda name: name.replace("-", "_") if isinstance(name, str) else name),
]


Named = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]  # what a file system takes
HistoryName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=64)]


class ParityFailed(TraceForgeError):
    """The comparison's verdict is no pass. Its report is published already."""


@flow(name="traceforge", persist_result=False)
def traceforge(
    config: RunConfig | None = None,
    stages: list[StageName] | None = None,
    run: Named = "new",
    runs_dir: Named = "runs",
    refresh: bool = False,
    history: HistoryName | None = None,
) -> dict[str, Any] | State[Any]:
    """From trajectory files to a trained adapter, and the proof that it was trained right.

    Args:
        config: Fields given here are laid over the run's own configuration; for a new run, over the default preset.
        stages: Which stages to do, in the pipeline's order whatever the order here. Empty: a full run.
        run: new, latest, or the id of the run to go on with.
        runs_dir: The folder in which runs lie.
        refresh: Do the work again even where a result with the same inputs and configuration is there.
        history: Add this run's comparison to the history of that name, below runs_dir, and show how they go over time.
    """
    with logs_to(get_run_logger()):
        try:
            return _traceforge(config, stages or None, run, written(runs_dir), refresh, history)
        except StoppedByFile as stop:
            log.info("%s Start this run again to go on.", stop)
            return Cancelled(message=str(stop))


def _traceforge(
    config: RunConfig | None,
    stages: Sequence[str] | None,
    run: str,
    runs_dir: Path,
    refresh: bool,
    history: str | None,
) -> dict[str, Any]:
    flow_run_id = str(runtime.flow_run.id)
    here, effective = begin(runs_dir, run, config, flow_run_id)
    require_trackers(effective)
    names = ordered(stages, effective)
    log.info("Run %s: %s", here.run_id, ", ".join(names))
    with _remembered(here, runs_dir / "history" / history if history else None) as remembered:
        check_start(names, effective, here)  # before hours are spent on the stages in front
        with here.lock():
            here.stop_file.unlink(missing_ok=True)  # it stopped an earlier call; this one is to go on
            earlier = last_session(here).get("flow_run_id")
            if isinstance(earlier, str) and earlier != flow_run_id:
                mark_crashed(earlier)
            session = Session(here, names, flow_run_id)
            for in_workers, block in groupby(names, lambda name: name in IN_WORKERS):
                if in_workers:
                    check_trainings(names, effective, here)
                # The monitor runs beside stages that work in child processes.
                with _monitored(here, effective) if in_workers else contextlib.nullcontext():
                    for name in block:
                        _perform(name, effective, here, session, refresh)
    summary = summarise(here)
    create_markdown_artifact(key="run-summary", markdown=as_markdown(summary), description=f"Run {here.run_id}")
    if "compare" in names and summary["parity"]["verdict"] != "pass":
        raise ParityFailed(
            f"Run {here.run_id}: {why_not(summary['parity'])}. The report says where and by how much: "
            f"{here.stage_dir('compare') / 'report.md'}" + "".join(f"\n{line}" for line in remembered.told)
        )
    if remembered.lost:
        raise TraceForgeError(
            f"Run {here.run_id} did what it was to do, and could not be added to the history: {remembered.lost}"
        )
    return summary


@dataclass(slots=True)
class _Remembered:
    """changed: what did since runs were good, if this one is not. lost: why the run is not in the history."""

    changed: str | None = None
    lost: str | None = None

    @property
    def told(self) -> list[str]:
        lost = f"It could not be added to the history: {self.lost}" if self.lost else None
        return [line for line in (self.changed, lost) if line]


@contextlib.contextmanager
def _remembered(run: Run, history: Path | None) -> Iterator[_Remembered]:
    """Add the run to the history when the block is done, or has failed; a run that was stopped, or that somebody else
    is at work on, says nothing about anything. What is yielded is filled in afterwards. A history that cannot be
    written hides neither the run's own failure nor its verdict."""
    remembered = _Remembered()
    if history is None:
        yield remembered
        return
    try:
        yield remembered
    except (StoppedByFile, RunInUse):
        raise
    except Exception as error:
        try:
            add_to_history(run, history, str(error) or type(error).__name__)
        except Exception as lost:
            log.warning("Run %s could not be added to the history: %s", run.run_id, lost)
        raise
    try:
        remembered.changed = add_to_history(run, history)
    except Exception as lost:
        remembered.lost = str(lost) or type(lost).__name__


def _perform(name: str, config: RunConfig, run: Run, session: Session, refresh: bool) -> None:
    if run.stop_file.exists():
        raise StoppedByFile(f"stopped before stage {name}, because {run.stop_file} is there.")
    session.note(name, "running")
    log.info("%s: %s", name, STAGES[name].title)
    try:
        with gpus_held(gpus_needed(name, config) if name in IN_WORKERS else 0):
            state = with_lineage(STAGE_TASKS[name], name, run)(config, run, refresh)
    except StoppedByFile as stop:
        session.note(name, "interrupted", message=str(stop))
        raise
    except Exception as error:
        session.note(name, "failed", message=str(error) or type(error).__name__)
        raise
    except BaseException:  # Ctrl-C, or a cancellation by Prefect
        session.note(name, "interrupted", message="Stopped before it was done.")
        raise
    reused = state.name == "Cached"
    session.note(name, "completed", reused=reused)
    result = run.result(name)
    if result is not None:
        if name == "ingest":
            refuse_nothing_read(result.figures, result.path)
        done = "reused" if reused else f"done in {result.seconds:.1f} s"
        log.info("%s: %s. %s", name, done, key_figures(name, result.figures))


@contextlib.contextmanager
def _monitored(run: Run, config: RunConfig) -> Iterator[None]:
    """The monitor runs inside the block. It ends with it, however it ends."""
    if not config.monitoring.enabled:
        yield
        return
    stop = threading.Event()
    already_there = descendants(os.getpid())  # an embedded server, say: not training
    watching = monitor.submit(
        run.path / "monitoring", config.monitoring.interval_seconds, stop, os.getpid(), already_there
    )
    try:
        yield
    finally:
        stop.set()
        watching.wait(timeout=MONITOR_END_SECONDS)
