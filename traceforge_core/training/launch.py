"""Starts the workers of a training stage as child processes, watches them, and leaves none behind.

    launch(job, seats(job, share_gpu=False), on_line=print_line)

Call it from the main thread (of the process, or of the Prefect task): workers end when the thread that started them
does. Each worker is `python -m traceforge_core.training.worker JOB.json` with one GPU (or none) to see, its own log
`<out_dir>/logs/rank<N>.log`, and a rendezvous through a file, so that no port can be taken. Workers stay in the
launcher's process group, so that signals meant for the whole group reach them.

Whatever ends the watch (a worker's error, its silence, Ctrl-C, a cancellation) ends every worker: SIGTERM, after 5 s
SIGKILL. A STOP file (stopping.py) is seen by the workers themselves, who end after the step at work. If the launcher
itself is killed the kernel kills the workers (PR_SET_PDEATHSIG, set by each worker).
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from traceforge_core.errors import TraceForgeError
from traceforge_core.processes.scratch import scratch_folder
from traceforge_core.runs.disk import require_room
from traceforge_core.runs.progress import FILE_NAME as PROGRESS
from traceforge_core.runs.stopping import StoppedByFile
from traceforge_core.training import hosts
from traceforge_core.training.held_gpus import held
from traceforge_core.training.job import TRAINING, Job
from traceforge_core.training.relay import Relay

logger = logging.getLogger(__name__)

OnLine = Callable[[int, str], None]
TERMINATE_SECONDS = 5.0
POLL_SECONDS = 0.05
LOOK_SECONDS = 1.0  # between looks at the stop file, the disk and the workers' signs of life
SETTLE_SECONDS = 1.0  # after the first end with an error: time for others to end by themselves, to find who was first
TAIL_LINES = 25
STOPPED_STATUS = 75  # of a worker that stopped because it was asked to
BESIDE_TRAINING = ("starting", "loading the model", "waiting for the other workers to", "evaluating")
# Names that make accelerate believe it is being launched by torchrun: it would then wrap every model in DDP.
LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class WorkerError(TraceForgeError):
    """A worker ended badly. `rank`: which. `signal`: the signal's name where one ended it, else None (a retry makes no
    sense then: somebody wanted it ended, or memory ran out)."""

    def __init__(self, message: str, rank: int, signal_name: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.signal = signal_name


@dataclass(slots=True)
class _Worker:
    rank: int
    process: subprocess.Popen[str]
    log: Path
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    pump: threading.Thread | None = None


def launch(
    job: Job,
    gpus: Sequence[str],
    *,
    on_line: OnLine | None = None,
    room: int = 0,
) -> None:
    """Run a job to its end, on GPUs that no other run of this machine then uses. `on_line(rank, line)` gets every line
    of output; by default the log gets as many as a person can read (relay.py).

    Raises WorkerError naming the worker, how it ended and the last lines of its log; StoppedByFile where the job's stop
    file was there; TraceForgeError where the disk has fewer than `room` bytes left. Anything raised in here (Ctrl-C,
    Prefect's cancellation) passes through once the workers have ended.
    """
    job.out_dir.mkdir(parents=True, exist_ok=True)
    (job.out_dir / "logs").mkdir(exist_ok=True)
    job_file = job.out_dir / "job.json"
    job.write(job_file)
    workers: list[_Worker] = []
    with held(gpus, job.stop_file), scratch_folder("launch") as scratch:
        try:
            on_line = on_line or Relay(job.out_dir / "logs")
            if job.hosts > 1:
                env = hosts.environment(_environment(job, 0, "", scratch), list(gpus))
                workers.append(_start(job, 0, hosts.here(job, job_file.resolve()), env, on_line))
                for command_there in hosts.on_other_hosts(job, job_file.resolve()):
                    logger.info("Start on another host, in the checkout there: %s", command_there)
            else:
                # -P: a folder named datasets or tasks in the working directory must not hide the library of that name.
                command = [sys.executable, "-P", "-m", "traceforge_core.training.worker", str(job_file)]
                for rank, gpu in enumerate(gpus):
                    env = _environment(job, rank, gpu, scratch)
                    workers.append(_start(job, rank, command, env, on_line))
            _watch(job, workers, scratch, room)
        finally:
            _end_all(workers)
            (job.out_dir / PROGRESS).unlink(missing_ok=True)


def _environment(job: Job, rank: int, gpu: str, scratch: Path) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_NAMES}
    package_root = str(Path(__file__).parents[2])
    env.update(
        TRACEFORGE_RANK=str(rank),
        TRACEFORGE_SCRATCH=str(scratch),
        TRACEFORGE_PARENT=str(os.getpid()),
        CUDA_VISIBLE_DEVICES=gpu,
        PYTHONPATH=os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH")))),
        PYTHONUNBUFFERED="1",
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_DISABLE_TELEMETRY="1",
        TRL_EXPERIMENTAL_SILENCE="1",
        CUDA_DEVICE_ORDER="PCI_BUS_ID",  # GPU 0 here is GPU 0 of nvidia-smi
    )
    if job.backend == "unsloth":  # it writes generated code, by default into the working directory
        env["UNSLOTH_COMPILE_LOCATION"] = str(scratch / f"unsloth{rank}")
    if job.workers > 1 and job.hosts == 1:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: its name may resolve to an address that is not there
    if job.device == "cpu":
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // job.workers)))
        # Threads that spin while they wait for each other make a busy machine ten times slower.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return env


def _start(job: Job, rank: int, command: list[str], env: dict[str, str], on_line: OnLine) -> _Worker:
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    worker = _Worker(rank, process, job.out_dir / "logs" / f"rank{rank}.log")
    # The thread runs in a copy of this context: loggers bound to a task's context (Prefect's) work there too.
    context = contextvars.copy_context()
    worker.pump = threading.Thread(target=context.run, args=(_pump, worker, on_line), daemon=True)
    worker.pump.start()
    return worker


def _pump(worker: _Worker, on_line: OnLine) -> None:
    stream: IO[str] | None = worker.process.stdout
    assert stream is not None
    with worker.log.open("a", encoding="utf-8") as log, stream:
        for line in stream:
            log.write(line)
            log.flush()
            if text := line.rstrip():
                worker.tail.append(text)
                on_line(worker.rank, text)


def _watch(job: Job, workers: list[_Worker], scratch: Path, room: int) -> None:
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


def _has_begun_training(job: Job, workers: list[_Worker], scratch: Path) -> bool:
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


def _check_progress(job: Job, workers: list[_Worker], scratch: Path, elapsed: float) -> None:
    """Raise where a worker has shown no sign of life for too long. One that waits for another is not to blame, unless
    all of them wait."""
    limit = job.section.hang_seconds
    if elapsed < limit:
        return
    silent: list[tuple[bool, _Worker, str, float]] = []
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


def _worker_error(job: Job, workers: list[_Worker], scratch: Path) -> WorkerError:
    """The error of the worker that failed first: not of those that only lost their peer."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline and any(worker.process.poll() is None for worker in workers):
        time.sleep(POLL_SECONDS)
    ended = [worker for worker in workers if worker.process.poll() not in (None, 0)]
    reports = _reports(scratch)

    def blame(worker: _Worker) -> tuple[int, float]:
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


def _log_end(worker: _Worker) -> str:
    lines = "\n".join(f"    {line}" for line in worker.tail)
    return (
        f"Last lines of its log ({worker.log}):\n{lines}" if lines else f"It wrote nothing to its log ({worker.log})."
    )


def _end_all(workers: list[_Worker]) -> None:
    """SIGTERM, and SIGKILL for those that are still there after 5 s (or at once, on a second Ctrl-C)."""
    running = [worker.process for worker in workers if worker.process.poll() is None]
    try:
        for process in running:
            process.terminate()
        deadline = time.monotonic() + TERMINATE_SECONDS
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
        for process in running:
            process.wait()
        for worker in workers:
            if worker.pump is not None:
                worker.pump.join(timeout=2.0)
