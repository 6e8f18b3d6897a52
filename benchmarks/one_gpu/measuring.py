"""Times and peaks of work on the GPU, each a line of OUT/long_context.jsonl as soon as it is there."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

GIB = 2**30
OUT = Path(os.environ.get("OUT", "."))


def record(section: str, name: str, **figures: Any) -> None:
    line = {"section": section, "name": name, **figures}
    with (OUT / "long_context.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    shown = ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
    )
    print(f"[{time.strftime('%H:%M:%S')}] {section}: {name}: {shown}", flush=True)


def measure(section: str, name: str, work: Callable[[], Any], repeats: int = 1, **figures: Any) -> float:
    """Runs and records work; returns the last run's seconds, infinity where memory ran out."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    try:
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            value = work()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    except torch.OutOfMemoryError as error:
        del error
        record(section, name, out_of_memory=True, peak_gib=torch.cuda.max_memory_allocated() / GIB, **figures)
        return float("inf")
    peaks = {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }
    if isinstance(value, float):
        peaks["value"] = value
    if repeats > 1:
        peaks["first_seconds"] = seconds[0]
    record(section, name, seconds=seconds[-1], **peaks, **figures)
    return seconds[-1]


def kernel_seconds(work: Callable[[], Any], repeats: int = 10) -> float:
    """Median device time of one call."""
    work()
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[repeats // 2] / 1e3


@contextlib.contextmanager
def cap(gib: float | None) -> Iterator[None]:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total) if gib else 1.0)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
