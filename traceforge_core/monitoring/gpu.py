"""The GPU sampler: one row a card every interval, into `nvidia_smi_monitor.csv`.

    watch(run.path / "monitoring", interval=2.0, stop=event, root_pid=os.getpid())     # returns when `stop` is set

Readings come through NVML (nvidia-ml-py), else from the command `nvidia-smi`. A card that does not report a field
(unified memory, MIG, a laptop without a power sensor) gives an empty cell. Without either source nothing is written.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from traceforge_core.monitoring.csvlog import CsvLog

log = logging.getLogger(__name__)

FILE_NAME = "nvidia_smi_monitor.csv"
FIELDS = ("memory_used_mib", "memory_total_mib", "util_gpu", "util_mem", "power_draw_w", "temp_c")
COLUMNS = ("ts", "elapsed_s", "gpu_index", *FIELDS)
SMI_QUERY = "index,memory.used,memory.total,utilization.gpu,utilization.memory,power.draw,temperature.gpu"
SMI_TIMEOUT = 20.0

Reading = dict[str, Any]
"""gpu_index and FIELDS of one card: MiB, percent, watts, degrees Celsius; None where the card does not say."""


def watch(csv_folder: Path, interval: float, stop: threading.Event, root_pid: int) -> bool:
    """Sample every `interval` seconds until `stop` is set. Returns False at once where no GPU can be read.

    `elapsed_s` counts from the start of this call. All cards of the machine are sampled, whichever processes use them
    (`root_pid` matters only to the host sampler). A sample that fails is left out, with one warning; so does a disk
    that fills up end the sampling, not the training beside it.
    """
    with gpu_source() as read:
        if read is None:
            return False
        started = time.monotonic()
        failing = False
        try:
            with CsvLog(csv_folder / FILE_NAME, COLUMNS) as rows:
                while True:
                    elapsed = time.monotonic() - started
                    ts = datetime.now(UTC).isoformat(timespec="milliseconds")
                    try:
                        readings = read()
                        failing = False
                    except (OSError, subprocess.SubprocessError, ValueError) as error:
                        readings = []
                        if not failing:
                            log.warning("GPU sample left out: %s", error)
                        failing = True
                    for reading in readings:
                        rows.row({"ts": ts, "elapsed_s": round(elapsed, 3), **reading})
                    if stop.wait(interval - (time.monotonic() - started) % interval):
                        return True
        except OSError as error:
            log.warning("GPU monitor stopped: cannot write %s: %s", csv_folder / FILE_NAME, error.strerror)
            return True


def gpu_count() -> int:
    """How many GPUs this machine has, as NVML or nvidia-smi tells; 0 where neither is there. Loads no CUDA."""
    with gpu_source() as read:
        try:
            return len(read()) if read else 0
        except (OSError, subprocess.SubprocessError, ValueError):
            return 0


@contextlib.contextmanager
def gpu_source() -> Iterator[Callable[[], list[Reading]] | None]:
    """A function that reads every card once: from NVML, else nvidia-smi; None where there is no card to read."""
    nvml = _nvml()
    if nvml is not None:
        try:
            yield lambda: _read_nvml(nvml)
        finally:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()
        return
    try:
        there = bool(_read_smi())
    except (OSError, subprocess.SubprocessError, ValueError):
        there = False
    yield _read_smi if there else None


def _nvml() -> Any | None:
    """The NVML module, initialised and with at least one card, or None."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        if pynvml.nvmlDeviceGetCount() > 0:
            return pynvml
    except pynvml.NVMLError:
        pass
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
    return None


def _read_nvml(nvml: Any) -> list[Reading]:
    def ask(question: Callable[..., Any], *arguments: Any) -> Any | None:
        try:
            return question(*arguments)
        except nvml.NVMLError:  # this card, driver or MIG slice does not report it
            return None

    readings = []
    for index in range(ask(nvml.nvmlDeviceGetCount) or 0):
        reading: Reading = dict.fromkeys(FIELDS) | {"gpu_index": index}
        readings.append(reading)
        handle = ask(nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            continue
        # Version 2 leaves out what the driver keeps for itself, as nvidia-smi does; old drivers know only version 1.
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
        if memory := memory or ask(nvml.nvmlDeviceGetMemoryInfo, handle):
            reading["memory_used_mib"] = memory.used // 2**20
            reading["memory_total_mib"] = memory.total // 2**20
        if rates := ask(nvml.nvmlDeviceGetUtilizationRates, handle):
            reading["util_gpu"], reading["util_mem"] = rates.gpu, rates.memory
        if (milliwatts := ask(nvml.nvmlDeviceGetPowerUsage, handle)) is not None:
            reading["power_draw_w"] = round(milliwatts / 1000, 2)
        reading["temp_c"] = ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    return readings


def _read_smi() -> list[Reading]:
    answer = subprocess.run(
        ["nvidia-smi", f"--query-gpu={SMI_QUERY}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=SMI_TIMEOUT,
        check=True,
    )
    readings = []
    for line in answer.stdout.splitlines():
        index, *cells = (cell.strip() for cell in line.split(","))
        if len(cells) == len(FIELDS):
            readings.append({"gpu_index": int(index)} | dict(zip(FIELDS, map(_number, cells), strict=True)))
    return readings


def _number(cell: str) -> float | int | None:
    """nvidia-smi says [N/A], [Not Supported] or [Unknown Error] where it has no number."""
    try:
        number = float(cell)
    except ValueError:
        return None
    return int(number) if number.is_integer() and "." not in cell else number
