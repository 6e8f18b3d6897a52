"""The workers of a preference stage as a mesh (replica × branch), and the three things they exchange.

Rank r is replica r // branches and branch r % branches (0: chosen, 1: rejected). Within a replica the branches exchange
their scores once a forward; all workers sum their gradients once an optimizer step; the rest are a few numbers for the
step log. Scalars travel over gloo. Gradients travel as one flat buffer, over NCCL from GPU to GPU, or over gloo from
pinned host memory.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from traceforge_core.errors import TraceForgeError
from traceforge_core.training.job import Job
from traceforge_core.training.launch import LAUNCHER_NAMES

logger = logging.getLogger(__name__)


class Mesh:
    """This worker's place among the others. A mesh of one exchanges nothing and costs nothing.

    `score_seconds` and `gradient_seconds` add up the time spent in exchanges, waiting for slower workers included;
    the caller sets them back to zero.
    """

    def __init__(self, rank: int = 0, branches: int = 1, replicas: int = 1, transport: str = "gloo") -> None:
        self.rank, self.branches, self.replicas = rank, branches, replicas
        self.size = branches * replicas
        self.replica, self.branch = divmod(rank, branches)
        self.transport = transport
        self.score_seconds = 0.0
        self.gradient_seconds = 0.0
        self._flat: torch.Tensor | None = None
        self._branches: dist.ProcessGroup | None = None
        self._everyone: dist.ProcessGroup | None = None
        if self.size > 1:
            self._everyone = dist.new_group(backend="gloo")
            # Every worker takes part in making every group.
            for replica in range(replicas):
                ranks = range(replica * branches, (replica + 1) * branches)
                group = dist.new_group(list(ranks), backend="gloo")
                if replica == self.replica:
                    self._branches = group

    def exchange(self, values: torch.Tensor) -> torch.Tensor:
        """What every branch of this replica has: (k,) float64 on the CPU in, (branches, k) out. One message."""
        if self.branches == 1:
            return values[None]
        clock = time.perf_counter()
        gathered = [torch.empty_like(values) for _ in range(self.branches)]
        dist.all_gather(gathered, values, group=self._branches)
        self.score_seconds += time.perf_counter() - clock
        return torch.stack(gathered)

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace every `.grad` by its sum over all workers; a missing one counts as zero. One flat buffer."""
        if self.size == 1:
            return
        device = parameters[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what is still being computed is no exchange
        clock = time.perf_counter()
        flat = self._flat_buffer(parameters)
        pieces = flat.split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            if parameter.grad is None:
                piece.zero_()
            else:
                piece.copy_(parameter.grad.reshape(-1), non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.all_reduce(flat, op=dist.ReduceOp.SUM)
        for parameter, piece in zip(parameters, pieces, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(piece.view_as(parameter), non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.gradient_seconds += time.perf_counter() - clock

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every worker, by rank."""
        if self.size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(gathered, own, group=self._everyone)
        return [row.tolist() for row in gathered]

    def gather_objects(self, value: Any) -> list[Any]:
        """A small picklable value of every worker, by rank."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self._everyone)
        return gathered

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite the tensors with those of rank 0."""
        if self.size == 1:
            return
        for tensor in tensors:
            on_cpu = tensor.detach().cpu().contiguous()
            dist.broadcast(on_cpu, src=0, group=self._everyone)
            tensor.detach().copy_(on_cpu)

    def _flat_buffer(self, parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """Made once: allocating pinned memory takes about a second a GB."""
        if self._flat is None:
            size = sum(parameter.numel() for parameter in parameters)
            dtype = parameters[0].dtype
            if self.transport == "nccl":
                self._flat = torch.empty(size, dtype=dtype, device=parameters[0].device)
            else:
                self._flat = torch.empty(size, dtype=dtype, pin_memory=parameters[0].device.type == "cuda")
        return self._flat


def join_mesh(job: Job, rank: int, scratch: Path | None) -> Mesh:
    """Meet the job's other workers: through a file in `scratch` on one host, through torchrun's address (`env://`)
    where there is none. Raises TraceForgeError where torchrun started another number of workers than the job has."""
    if job.workers == 1:
        return Mesh()
    backend = "cpu:gloo,cuda:nccl" if job.transport == "nccl" else "gloo"
    timeout = timedelta(seconds=job.section.hang_seconds)
    if scratch is not None:
        store = dist.FileStore(str(scratch / "rendezvous"), job.workers)
        dist.init_process_group(backend, store=store, rank=rank, world_size=job.workers, timeout=timeout)
    else:
        if int(os.environ.get("WORLD_SIZE", "1")) != job.workers:
            raise TraceForgeError(
                f"This job has {job.workers} workers ({job.branches} branches × {job.replicas} replicas), but "
                f"{os.environ.get('WORLD_SIZE', '1')} were started. Start on every host what the run's log says."
            )
        dist.init_process_group(backend, init_method="env://", timeout=timeout)
        for name in LAUNCHER_NAMES:  # accelerate would take them for its own and wrap the model in DDP
            os.environ.pop(name, None)
    logger.info("Worker %d of %d is connected; gradients travel over %s.", rank, job.workers, job.transport)
    return Mesh(rank, job.branches, job.replicas, job.transport)
