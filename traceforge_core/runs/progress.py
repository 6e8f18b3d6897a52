"""How far a stage at work is, on disk, for whoever shows it: a terminal, Prefect's page, another shell.

    with progress(out_dir, "making SFT samples", "samples", total=48) as told:      # in the stage
        told.add(1)
    seen = read_progress(run.partial_dir("datasets"))                               # beside it
    print(seen.text())                                                              # 12 of 48 samples, 3.1 a second

A stage keeps `progress.json` in its folder while it works; processes that share a piece of work each keep one of their
own in `.shards`, and what is read is their sum. Training says what it does in the same file, and how far it is in the
step log, `metrics.jsonl`, which is there anyway. Nothing here can make a stage fail: a full disk only stops the
telling.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE_NAME = "progress.json"
PARTS = ".shards/*.progress.json"
# A stage's own folder, a job of its own in it (the proof on cut pairs), and a series of jobs.
PLACES = (FILE_NAME, f"*/{FILE_NAME}")
WRITE_SECONDS = 0.2
RECENT_STEPS = 20
TAIL_BYTES = 1 << 16


class ProgressFile:
    """The writer of one such file. Cheap enough to be called for every item: it writes five times a second at most."""

    def __init__(self, path: Path, doing: str, unit: str = "", total: float | None = None, done: float = 0) -> None:
        """`done`: what was there before, such as the finished part of an interrupted stage."""
        self._path = path
        self._told: dict[str, Any] = {"doing": doing, "unit": unit, "total": total, "done": done, "counts": {}}
        self._told |= {"began": time.time(), "began_with": done}
        self._next = 0.0
        self.write()

    def add(self, done: float = 1, **counts: float) -> None:
        """So much more is done. `counts`: what else was counted on the way, by name."""
        self._told["done"] += done
        for name, more in counts.items():
            self._told["counts"][name] = self._told["counts"].get(name, 0) + more
        if time.monotonic() >= self._next:
            self.write()

    def doing(self, what: str) -> None:
        """What is being done now, in words."""
        self._told["doing"] = what
        self.write()

    def write(self) -> None:
        """Write it now."""
        self._next = time.monotonic() + WRITE_SECONDS
        scratch = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        with contextlib.suppress(OSError):
            scratch.write_text(json.dumps(self._told), encoding="utf-8")
            scratch.replace(self._path)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


@contextlib.contextmanager
def progress(
    folder: Path, doing: str, unit: str = "", total: float | None = None, done: float = 0
) -> Iterator[ProgressFile]:
    """Tell in `folder` how far a piece of work is; the file goes with the block, however it ends."""
    told = ProgressFile(folder / FILE_NAME, doing, unit, total, done)
    try:
        yield told
    finally:
        told.remove()


@dataclass(frozen=True, slots=True)
class Progress:
    """What a stage at work has told. doing: in words. done, total: in `unit`; total is None where nobody can know, and
    done is 0 where nothing is counted. counts: other things counted, or the last figures of a training, by name.
    rate: of `done`, a second. seconds_left: None where it cannot be told."""

    doing: str
    unit: str = ""
    done: float = 0
    total: float | None = None
    counts: Mapping[str, float] = field(default_factory=dict)
    rate: float | None = None
    seconds_left: float | None = None

    @property
    def percent(self) -> float | None:
        """0 to 100, or None where the total is not known."""
        return min(100.0, 100.0 * self.done / self.total) if self.total else None

    def sentence(self) -> str:
        """What is being done and how far it is. For training the step says it all."""
        return self.text() if self.unit in ("", "steps") else f"{self.doing}: {self.text()}"

    def text(self) -> str:
        """Everything in one line, such as "12 of 25 steps, loss 2.310, 1,200 tokens/s, 13 s left"."""
        if not self.unit or (not self.done and not self.total):
            return self.doing
        if self.unit == "bytes":
            size = f" of {_mb(self.total)}" if self.total else ""
            parts = [f"{_mb(self.done)}{size} MB"]
        else:
            parts = [f"{self.done:,.0f}" + (f" of {self.total:,.0f}" if self.total else "") + f" {self.unit}"]
        parts += [_figure(name, value) for name, value in self.counts.items()]
        if self.rate and self.unit == "bytes":
            parts.append(f"{self.rate / 1e6:.1f} MB/s")
        elif self.rate and self.unit != "steps":
            parts.append(f"{self.rate:,.1f} a second")
        if self.seconds_left is not None:
            parts.append(f"{span(self.seconds_left)} left")
        return ", ".join(parts)


def read_progress(folder: Path) -> Progress | None:
    """What the stage at work in `folder` told last; None where it has told nothing, or is not at work."""
    files = [file for place in PLACES for file in folder.glob(place)]
    newest = max(files, key=_changed, default=None)
    told = _read(newest) if newest else None
    if newest is None or told is None:
        return None
    steps = _last_records(newest.with_name("metrics.jsonl"))
    if steps and told.get("unit") == "steps":
        return _of_training(told, steps)
    parts = [part for file in newest.parent.glob(PARTS) if (part := _read(file)) is not None]
    counts: dict[str, float] = {}
    for each in [told, *parts]:
        for name, value in each["counts"].items():
            counts[name] = counts.get(name, 0) + value
    done, total = sum(each["done"] for each in [told, *parts]), told["total"]
    seconds = time.time() - told["began"]
    new = done - told["began_with"]
    rate = new / seconds if new > 0 and seconds > 1 else None
    left = (total - done) / rate if rate and total else None
    return Progress(told["doing"], told["unit"], done, total, counts, rate, left)


def forget_progress(folder: Path) -> None:
    """Remove what a stage that was killed told, also what it was just writing."""
    for place in PLACES:
        for file in (*folder.glob(place), *folder.glob(f"{place}.*.tmp")):
            file.unlink(missing_ok=True)


def span(seconds: float) -> str:
    """A time as people say it: "40 s", "12 min", "3 h 5 min"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _of_training(told: Mapping[str, Any], steps: list[dict[str, Any]]) -> Progress:
    last = steps[-1]
    counts = {name: last[name] for name in ("loss", "margin") if last.get(name) is not None}
    seconds = sum(step.get("seconds") or 0.0 for step in steps)
    if seconds:
        counts["tokens/s"] = sum(step.get("tokens") or 0 for step in steps) / seconds
    if last.get("peak_memory_mib"):
        counts["peak_memory_mib"] = last["peak_memory_mib"]
    total, rate = last.get("total_steps"), len(steps) / seconds if seconds else None
    left = (total - last["step"]) / rate if total and rate else None
    return Progress(str(told["doing"]), "steps", last["step"], total, counts, rate, left)


def _last_records(log: Path) -> list[dict[str, Any]]:
    """The last whole lines of a step log."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    records = []
    for line in lines[-RECENT_STEPS - 1 :]:
        with contextlib.suppress(ValueError):  # cut off in front, or still being written
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records


def _read(file: Path) -> dict[str, Any] | None:
    try:
        told: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return told if {"doing", "unit", "total", "done", "counts", "began", "began_with"} <= told.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _figure(name: str, value: float) -> str:
    if name == "peak_memory_mib":
        return f"peak {value / 1024:.1f} GiB"
    if name == "tokens/s":
        return f"{value:,.0f} {name}"
    if name in ("loss", "margin"):
        return f"{name} {value:.3f}"
    return f"{value:,.0f} {name}"


def _mb(size: float | None) -> str:
    return f"{(size or 0) / 1e6:,.1f}"
