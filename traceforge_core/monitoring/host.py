"""The host sampler: CPU and memory of the training processes, a row a process every interval, to `host_monitor.csv`.

    watch(run.path / "monitoring", interval=2.0, stop=event, root_pid=os.getpid())     # returns when `stop` is set

Training processes are the processes below `root_pid`, at any depth, `root_pid` itself left out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

import psutil

from traceforge_core.monitoring.csvlog import CsvLog

log = logging.getLogger(__name__)

FILE_NAME = "host_monitor.csv"
COLUMNS = ("ts", "elapsed_s", "pid", "command", "cpu_percent", "rss_mib", "host_available_mib")


def watch(
    csv_folder: Path, interval: float, stop: threading.Event, root_pid: int, ignore: Collection[int] = ()
) -> None:
    """Sample every `interval` seconds until `stop` is set.

    cpu_percent: since the last row of that process, 100 = one core; empty in its first row. rss_mib: resident memory.
    host_available_mib: what the machine can still give. `ignore` names processes that are not training, such as a
    server started before. A disk that fills up ends the sampling with a warning, not the training beside it.
    """
    known: dict[int, psutil.Process] = {}
    started = time.monotonic()
    try:
        with CsvLog(csv_folder / FILE_NAME, COLUMNS) as rows:
            while True:
                elapsed = time.monotonic() - started
                ts = datetime.now(UTC).isoformat(timespec="milliseconds")
                available = psutil.virtual_memory().available // 2**20
                for process in _below(root_pid, ignore):
                    earlier = known.get(process.pid)
                    try:
                        if earlier is None or earlier != process:  # another process may have got the same number
                            known[process.pid] = process
                            process.cpu_percent()  # the first call only starts the count
                            percent = None
                        else:
                            percent = earlier.cpu_percent()
                        reading = {
                            "pid": process.pid,
                            "command": _command(process),
                            "cpu_percent": percent,
                            "rss_mib": process.memory_info().rss // 2**20,
                        }
                    except psutil.Error:  # it ended meanwhile
                        continue
                    rows.row({"ts": ts, "elapsed_s": round(elapsed, 3), "host_available_mib": available, **reading})
                if stop.wait(interval - (time.monotonic() - started) % interval):
                    return
    except OSError as error:
        log.warning("Host monitor stopped: cannot write %s: %s", csv_folder / FILE_NAME, error.strerror)


def descendants(root_pid: int) -> frozenset[int]:
    """Process numbers below `root_pid`, at any depth."""
    return frozenset(process.pid for process in _below(root_pid, ()))


def _below(root_pid: int, ignore: Collection[int]) -> list[psutil.Process]:
    try:
        return [p for p in psutil.Process(root_pid).children(recursive=True) if p.pid not in ignore]
    except psutil.Error:
        return []


def _command(process: psutil.Process) -> str:
    """What a process runs, short: a worker's stage and rank, the module of `python -m`, the script, or the program."""
    words = process.cmdline()
    job = Path(words[-1]) if words else Path()
    if job.name == "job.json":  # a worker of training/launch.py: the job lies in the stage's folder
        return f"{job.parent.name} {process.environ().get('TRACEFORGE_RANK', '')}".strip()
    if "-m" in words[:-1]:
        module: str = words[words.index("-m") + 1]
        return module
    script = next((word for word in words[1:] if word.endswith(".py")), None)
    return Path(script).name if script else process.name()
