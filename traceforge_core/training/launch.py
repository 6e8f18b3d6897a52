"""Starts the workers of a training stage as child processes, has them watched, and leaves none behind.

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
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from traceforge_core.processes.scratch import scratch_folder
from traceforge_core.runs.progress import FILE_NAME as PROGRESS
from traceforge_core.training import hosts
from traceforge_core.training.held_gpus import held
from traceforge_core.training.job import Job
from traceforge_core.training.relay import Relay
from traceforge_core.training.watch import Worker, watch

logger = logging.getLogger(__name__)

OnLine = Callable[[int, str], None]
TERMINATE_SECONDS = 5.0
# Names that make accelerate believe it is being launched by torchrun: it would then wrap every model in DDP.
LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
    workers: list[Worker] = []
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
            watch(job, workers, scratch, room)
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


def _start(job: Job, rank: int, command: list[str], env: dict[str, str], on_line: OnLine) -> Worker:
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    worker = Worker(rank, process, job.out_dir / "logs" / f"rank{rank}.log")
    # The thread runs in a copy of this context: loggers bound to a task's context (Prefect's) work there too.
    context = contextvars.copy_context()
    worker.pump = threading.Thread(target=context.run, args=(_pump, worker, on_line), daemon=True)
    worker.pump.start()
    return worker


def _pump(worker: Worker, on_line: OnLine) -> None:
    stream: IO[str] | None = worker.process.stdout
    assert stream is not None
    with worker.log.open("a", encoding="utf-8") as log, stream:
        for line in stream:
            log.write(line)
            log.flush()
            if text := line.rstrip():
                worker.tail.append(text)
                on_line(worker.rank, text)


def _end_all(workers: list[Worker]) -> None:
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
