"""What this machine has: GPUs through NVML, memory, disk and limits. Reads only; imports no torch."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from traceforge_core.doctor.findings import Finding

GIB = 2**30
DISK_GIB_WITH_GPU = 40  # weights of an 8B model in bf16 (16 GiB), a merged export of it, a run's files
DISK_GIB_WITHOUT = 2
HOST_GIB_A_WORKER = 24  # inputs of 36 layers at 80K tokens: 22.5 GiB, and the process itself
SHM_MIB_FOR_NCCL = 256


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver sees it. `capability` is (major, minor); memory in MiB; `cuda`: the driver's newest."""

    index: int
    name: str
    memory_total_mib: int
    memory_free_mib: int
    capability: tuple[int, int]
    driver: str
    cuda: str

    @property
    def bf16(self) -> bool:
        return self.capability >= (8, 0)


def read_gpus() -> tuple[list[Gpu], Finding | None]:
    """The GPUs, and a finding where there is a driver that does not answer."""
    try:
        import pynvml
    except ImportError:
        return [], Finding(
            "GPUs", "warning", "nvidia-ml-py is not installed, so no GPU can be looked at.", "pip install nvidia-ml-py"
        )
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if not Path("/proc/driver/nvidia").exists() and shutil.which("nvidia-smi") is None:
            return [], None
        return [], Finding(
            "GPUs",
            "problem",
            f"There is an NVIDIA driver, but it does not answer: {error}.",
            "Run nvidia-smi. After a driver update restart the machine; in a container start it with --gpus all.",
        )
    try:
        driver, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
            gpus.append(
                Gpu(
                    index=index,
                    name=pynvml.nvmlDeviceGetName(handle),
                    memory_total_mib=int(memory.total) // 2**20,
                    memory_free_mib=int(memory.free) // 2**20,
                    capability=(major, minor),
                    driver=driver,
                    cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
                )
            )
        return gpus, None
    except pynvml.NVMLError as error:
        return [], Finding(
            "GPUs", "problem", f"NVML stopped answering: {error}.", "Run nvidia-smi and see its message."
        )
    finally:
        pynvml.nvmlShutdown()


def usable_gpus(gpus: list[Gpu]) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves; by number only, a GPU named by its UUID counts by its place."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return gpus
    chosen = []
    for place, name in enumerate(part.strip() for part in named.split(",")):
        index = int(name) if name.isdigit() else place
        if not name or name.startswith("-") or index >= len(gpus):
            break
        chosen.append(gpus[index])
    return chosen


def look_at_gpus(gpus: list[Gpu]) -> list[Finding]:
    """One finding a GPU, and one where the environment hides some."""
    findings = []
    for gpu in gpus:
        total, free = gpu.memory_total_mib / 1024, gpu.memory_free_mib / 1024
        major, minor = gpu.capability
        what = (
            f"{gpu.name}, {total:.1f} GiB ({free:.1f} free), compute capability {major}.{minor}, "
            f"driver {gpu.driver} (CUDA {gpu.cuda}), bf16 {'yes' if gpu.bf16 else 'no'}"
        )
        if not gpu.bf16:
            status, do = (
                "warning",
                "This card has no bf16: set model.dtype to float32 (slow), or use an Ampere or newer.",
            )
        elif free < 0.9 * total:
            status, do = "warning", "Other programs hold GPU memory (nvidia-smi names them): end them before training."
        else:
            status, do = "ok", ""
        findings.append(Finding(f"GPU {gpu.index}", status, what, do, asdict(gpu)))  # type: ignore[arg-type]
    if not gpus:
        findings.append(
            Finding("GPUs", "note", "No NVIDIA GPU: stages run on the CPU (the tiny model, for trying out).")
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus and visible is not None:
        findings.append(
            Finding("CUDA_VISIBLE_DEVICES", "note", f"It is set to {visible!r}: only those GPUs are used.", "", {})
        )
    return findings


def look_at_host(gpus: list[Gpu], folder: Path) -> list[Finding]:
    """Processor, memory, disk below `folder`, locked-memory limit and shared memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processor = Finding("processor", "ok", f"{platform.machine()}, {cores} cores to use", figures={"cores": cores})
    return [processor, _memory(gpus), _disk(gpus, folder), _locked(), *_shared_memory(gpus)]


def _memory(gpus: list[Gpu]) -> Finding:
    import psutil

    total, available = psutil.virtual_memory().total, psutil.virtual_memory().available
    limit, usable = _cgroup_limit(), usable_memory()
    within = f", limited to {limit / GIB:.1f} GiB here" if limit is not None and limit < total else ""
    what = f"{total / GIB:.1f} GiB ({available / GIB:.1f} available){within}"
    figures = {"total_gib": round(total / GIB, 1), "available_gib": round(available / GIB, 1)}
    figures["usable_gib"] = round(usable / GIB, 1)
    workers = min(2, len(gpus))
    if gpus and usable < workers * HOST_GIB_A_WORKER * GIB:
        return Finding(
            "host memory",
            "warning",
            what,
            f"An 80K pair of an 8B model keeps 22.5 GiB of layer inputs in host memory a worker ({workers} here): "
            "lower datasets.preference.max_length, or add memory.",
            figures,
        )
    if usable < 4 * GIB:
        return Finding("host memory", "warning", what, "The tiny demo wants about 4 GiB.", figures)
    return Finding("host memory", "ok", what, "", figures)


def usable_memory() -> int:
    """Bytes of host memory that processes here may use: the machine's, or the container's limit."""
    import psutil

    total: int = psutil.virtual_memory().total
    return min(total, _cgroup_limit() or total)


def _cgroup_limit() -> int | None:
    """Bytes that a container may use, or None."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            return int(Path(name).read_text(encoding="ascii"))
    return None


def _disk(gpus: list[Gpu], folder: Path) -> Finding:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free / GIB
    wanted = DISK_GIB_WITH_GPU if gpus else DISK_GIB_WITHOUT
    figures = {"folder": str(there), "free_gib": round(free, 1)}
    what = f"{free:.1f} GiB free at {there}"
    if free < wanted:
        return Finding(
            "disk", "warning", what, f"Runs want about {wanted} GiB: free some, or name --runs-dir.", figures
        )
    if not os.access(there, os.W_OK):
        return Finding(
            "disk", "problem", f"{there} cannot be written to.", "Choose another place with --runs-dir.", figures
        )
    return Finding("disk", "ok", what, "", figures)


def _locked() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)

    def shown(limit: int) -> str:
        return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:.0f} MiB"

    # CUDA pins memory through its driver, which on most systems does not count here: the trial `pinned memory` decides.
    what = shown(soft) + (f" (may be raised to {shown(hard)})" if hard != soft else "")
    figures = {"soft_bytes": soft, "hard_bytes": hard}
    return Finding("locked-memory limit", "ok" if soft == resource.RLIM_INFINITY else "note", what, "", figures)


def _shared_memory(gpus: list[Gpu]) -> list[Finding]:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return []
    usage = shutil.disk_usage(shm)
    what = f"{usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB free"
    figures = {"free_mib": usage.free // 2**20, "total_mib": usage.total // 2**20}
    if len(gpus) > 1 and usage.free < SHM_MIB_FOR_NCCL * 2**20:
        do = "NCCL between two GPUs of one host goes through it: start the container with --ipc=host or --shm-size=1g."
        return [Finding("/dev/shm", "warning", what, do, figures)]
    return [Finding("/dev/shm", "ok", what, "", figures)]
