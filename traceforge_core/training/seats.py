"""Which GPU each worker of this host gets. Starts no CUDA context."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from pathlib import Path

from traceforge_core.errors import TraceForgeError, page
from traceforge_core.training import hosts
from traceforge_core.training.held_gpus import free_first
from traceforge_core.training.job import Job

logger = logging.getLogger(__name__)


def visible_gpus() -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES would name them.

    Empty where there is none, or where the installed torch was built without CUDA.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        gpus = []
        for name in (part.strip() for part in named.split(",")):
            if not name or name == "-1":  # CUDA itself stops reading there
                break
            gpus.append(name)
    else:
        gpus = [str(index) for index in range(_gpu_count())]
    if gpus and _torch_lacks_cuda():
        logger.warning("There are %d GPUs, but the installed torch was built without CUDA: using the CPU.", len(gpus))
        return []
    return gpus


def _gpu_count() -> int:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library: whatever NVML says, there is no GPU to use
        return 0
    try:
        count: int = pynvml.nvmlDeviceGetCount()
        return count
    finally:
        pynvml.nvmlShutdown()


def _torch_lacks_cuda() -> bool:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    with contextlib.suppress(OSError):
        return "cuda: Optional[str] = None" in Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    return False


def seats(job: Job, *, share_gpu: bool = False) -> list[str]:
    """The GPU of each worker on this host ("" for the CPU), those that no other run is using first.

    Raises TraceForgeError where there are too few.
    """
    count = hosts.workers_here(job)
    if job.device == "cpu":
        return [""] * count
    gpus = visible_gpus()
    if len(gpus) >= count:
        return free_first(gpus)[:count]
    if share_gpu and gpus:
        return [gpus[rank % len(gpus)] for rank in range(count)]
    raise TraceForgeError(
        f"{job.kind} needs {count} GPUs, one a worker, and {len(gpus)} can be used here "
        f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). Use a machine with more, set "
        "preference.strategy to shared_prefix (one GPU does both branches), set preference.share_gpu to true (slow, "
        f"for trying things out), or set model.device to cpu. {page('too-few-gpus')}"
    )
