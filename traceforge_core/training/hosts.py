"""Workers of a strategy on several hosts: torchrun starts those of each, and they meet at `hosts.address`.

    traceforge run --set hosts.count=2 --set hosts.address=10.0.0.1:29500

The launcher starts torchrun on this machine, which has rank 0 and writes all files, and says in the log what to start
on each other one. Every host needs this checkout, the same packages, and the runs folder under the same path (a network
disk). Where a host has several interfaces, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME say which one to use.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from traceforge_core.errors import TraceForgeError
from traceforge_core.training.job import Job

WAIT_SECONDS = 3600  # for people to start the other hosts' parts
BY_THE_LAUNCHER = ("TRACEFORGE_RANK", "TRACEFORGE_PARENT")  # who starts the workers says these: here torchrun does


def workers_here(job: Job) -> int:
    """Workers of a job on each host. Raises TraceForgeError where they cannot be shared out equally."""
    if job.workers % job.hosts:
        raise TraceForgeError(
            f"{job.kind} has {job.workers} workers, which {job.hosts} hosts cannot share equally. Set hosts.count to a "
            "divisor of it, or change preference.replicas."
        )
    return job.workers // job.hosts


def on_other_hosts(job: Job, job_file: Path) -> list[str]:
    """The command for each of the other hosts, as a person types it in the checkout there."""
    return [shlex.join(["torchrun", *_arguments(job, job_file, host)]) for host in range(1, job.hosts)]


def here(job: Job, job_file: Path) -> list[str]:
    """The command that starts torchrun on this host. It ends with this process, and its workers with it."""
    bound = [sys.executable, "-P", "-m", "traceforge_core.processes.bound", str(os.getpid())]
    return [*bound, "-m", "torch.distributed.run", *_arguments(job, job_file, 0)]


def _arguments(job: Job, job_file: Path, host: int) -> list[str]:
    name, _, port = str(job.config.hosts.address).partition(":")
    return [
        f"--nnodes={job.hosts}",
        f"--node-rank={host}",
        f"--nproc-per-node={workers_here(job)}",
        f"--master-addr={name}",
        f"--master-port={port}",
        f"--rdzv-conf=timeout={WAIT_SECONDS}",
        "--max-restarts=0",
        "-m",
        "traceforge_core.training.worker",
        str(job_file),
    ]


def environment(env: Mapping[str, str], gpus: list[str]) -> dict[str, str]:
    """A worker's environment made torchrun's: workers take their places from it, and a GPU each of `gpus`. Those on
    this host still leave the reason of an end in the launcher's folder: torchrun has but one status for every end."""
    left = {name: value for name, value in env.items() if name not in BY_THE_LAUNCHER}
    return left | {"CUDA_VISIBLE_DEVICES": ",".join(gpus) if any(gpus) else ""}
