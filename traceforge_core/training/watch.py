"""Watches the workers of a job until they end, and says of those that end badly which one failed first, and why.

A worker shows what it is doing in `beat<rank>` of the scratch folder, and leaves why it ended in `error<rank>.json`
there (worker.py); the rest is its exit status and the last lines of its log.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traceforge_core.errors import TraceForgeError
from traceforge_core.runs.disk import require_room
from traceforge_core.runs.stopping import StoppedByFile
from traceforge_core.training.job import TRAINING, Job

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
LOOK_SECONDS = 1.0  # between looks at the stop file, the disk and the workers' signs of life
SETTLE_SECONDS = 1.0  # after the first end with an error: time for others to end by themselves, to find who was first
TAIL_LINES = 25
STOPPED_STATUS = 75  # of a worker that stopped because it was asked to
BESIDE_TRAINING = ("starting", "loading the model", "waiting for the other workers to", "evaluating")


class WorkerError(TraceForgeError):
    """A worker ended badly. `rank`: which. `signal`: the signal's name where one ended it, else None (a retry makes no
    sense then: somebody wanted it ended, or memory ran out)."""

    def __init__(self, message: str, rank: int, signal_name: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.signal = signal_name


@dataclass(slots=True)
class Worker:
    """A worker that was started. `tail`: the last lines of its output, which `pump` reads."""

    rank: int
    process: subprocess.Popen[str]
    log: Path
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    pump: threading.Thread | None = None


def watch(job: Job, workers: list[Worker], scratch: Path, room: int) -> None:
    """Return when all workers have ended well.

    Raises WorkerError where one ends badly or shows no sign of life for too long, StoppedByFile where they were asked
    to stop, TraceForgeError where the disk has fewer than `room` bytes left. Ends no worker.
    """
    started = time.monotonic()
    next_slow_check = started
    asked_to_stop = False
    while True:
        codes = [worker.process.poll() for worker in workers]
        if any(code not in (None, 0, STOPPED_STATUS) for code in codes):
            # torchrun has but one status for every end of its workers: what they told says whether they were stopped.
            if job.hosts > 1 and (told := _told_of_stop(scratch)):
                raise StoppedByFile(f"{job.kind}: {told}")
            raise _worker_error(job, workers, scratch)
        if None not in codes:
            if STOPPED_STATUS in codes:
                raise StoppedByFile(f"{job.kind}: {_told_of_stop(scratch) or 'Stopped.'}")
            return
        now = time.monotonic()
        if now >= next_slow_check:
            next_slow_check = now + LOOK_SECONDS
            if not asked_to_stop and job.stop_file.exists():
                asked_to_stop = True
                if not _has_begun_training(job, workers, scratch):
                    raise StoppedByFile(f"{job.kind}: stopped before it had begun, because {job.stop_file} is there.")
                logger.info("%s is there: training ends after the step at work, with a checkpoint.", job.stop_file)
            if room:
                goes_on = "run the stage again: it goes on from its last checkpoint"
                require_room(job.out_dir, room, f"{job.kind} was stopped, because its next checkpoint", goes_on)
            if job.hosts == 1:  # on several, torch's own time limit on an exchange (hang_seconds too) has to do
                _check_progress(job, workers, scratch, now - started)
        time.sleep(POLL_SECONDS)


def _has_begun_training(job: Job, workers: list[Worker], scratch: Path) -> bool:
    """Whether there is a step whose end is worth waiting for."""
    if job.kind not in TRAINING:
        return False
    if job.hosts > 1:  # signs of life from other hosts do not come here
        return (job.out_dir / "metrics.jsonl").exists()
    doing = [_beat(scratch, worker.rank)[1] for worker in workers]
    return not all(what.startswith(BESIDE_TRAINING) for what in doing)


def _beat(scratch: Path, rank: int) -> tuple[float | None, str]:
    """A worker's last sign of life: when (as time.time() counts), and what it was doing."""
    beat = scratch / f"beat{rank}"
    try:
        return beat.stat().st_mtime, beat.read_text(encoding="utf-8")
    except OSError:
        return None, "starting"


def _check_progress(job: Job, workers: list[Worker], scratch: Path, elapsed: float) -> None:
    """Raise where a worker has shown no sign of life for too long. One that waits for another is not to blame, unless
    all of them wait."""
    limit = job.section.hang_seconds
    if elapsed < limit:
        return
    silent: list[tuple[bool, Worker, str, float]] = []
    for worker in workers:
        seen, doing = _beat(scratch, worker.rank)
        age = elapsed if seen is None else time.time() - seen
        if age > limit and worker.process.poll() is None:
            silent.append((doing.startswith("waiting"), worker, doing, age))
    running = sum(worker.process.poll() is None for worker in workers)
    if any(not waits for waits, *_ in silent) or len(silent) == running > 0:
        _, worker, doing, age = min(silent, key=lambda found: (found[0], -found[3]))
        raise WorkerError(
            f"{job.kind}: {job.describe(worker.rank)} showed no progress for {age:.0f} s (it was {doing}) and was "
            f"ended. If a step really takes so long, raise hang_seconds (now {limit}).\n{_log_end(worker)}",
            worker.rank,
        )


def _worker_error(job: Job, workers: list[Worker], scratch: Path) -> WorkerError:
    """The error of the worker that failed first: not of those that only lost their peer."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline and any(worker.process.poll() is None for worker in workers):
        time.sleep(POLL_SECONDS)
    ended = [worker for worker in workers if worker.process.poll() not in (None, 0)]
    reports = _reports(scratch)

    def blame(worker: Worker) -> tuple[int, float]:
        report = reports.get(worker.rank, {})
        if report.get("lost_peer"):
            return (2, report["time"])
        return (1, report["time"]) if report else (0, 0.0)  # no report at all: killed, or crashed below Python

    worker = min(ended, key=blame)
    for thread in (worker.pump for worker in ended):
        if thread is not None:
            thread.join(timeout=1.0)  # the last lines of the log are the ones that matter
    code, rank = worker.process.returncode, worker.rank
    if job.hosts > 1:  # what ended is torchrun; of its workers here, the first that had a reason of its own
        causes = {of: told["time"] for of, told in reports.items() if told["for_people"] and not told["lost_peer"]}
        rank = min(causes, key=causes.__getitem__, default=-1)
    report = reports.get(rank, {})
    who = f"{job.kind}: {job.describe(rank) if rank >= 0 else f'torchrun, one of {job.hosts} hosts,'}"
    if report.get("for_people"):
        return WorkerError(f"{who}: {report['message']}\nIts log: {worker.log}", worker.rank)
    if code < 0:
        name = signal.Signals(-code).name
        hint = " Often that means the machine ran out of memory." if code == -signal.SIGKILL else ""
        return WorkerError(f"{who} was ended by {name}.{hint}\n{_log_end(worker)}", worker.rank, name)
    what = f": {report['message']}" if report else ""
    return WorkerError(f"{who} ended with exit status {code}{what}\n{_log_end(worker)}", worker.rank)


def _told_of_stop(scratch: Path) -> str | None:
    """What a worker of this host said that ended because of the stop file; None where none did."""
    return next((report["message"] for report in _reports(scratch).values() if report["stopped"]), None)


def _reports(scratch: Path) -> dict[int, dict[str, Any]]:
    """Why workers of this host ended, by rank, as far as they could say."""
    found = {}
    for file in sorted(scratch.glob("error*.json")):
        with contextlib.suppress(OSError, ValueError):  # ended while it was writing
            found[int(file.stem.removeprefix("error"))] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _log_end(worker: Worker) -> str:
    lines = "\n".join(f"    {line}" for line in worker.tail)
    return (
        f"Last lines of its log ({worker.log}):\n{lines}" if lines else f"It wrote nothing to its log ({worker.log})."
    )
