"""Does anything leak? Many small runs one after another against a real server and worker, and what is left after each.

    python benchmarks/soak.py --runs 50

Starts what `make serve` starts, on a free port, with a database of its own in a temporary folder; each run is the
deployment `ingest` on the shipped samples, as a new run. After each, when it has ended: memory, processes, open files
and listening ports of server and worker together, temporary files, and the slots taken of the limit `gpu`. Printed: the
first and the last figures, and how much the second half grows a run (a straight line through it). Exit status 1 where
processes, ports, temporary files or slots are left over, or open files grow. `--json` prints one JSON object with every
sample; each sample also goes to stderr when it is taken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
ENDED = ("Completed", "Failed", "Crashed", "Cancelled")
TOO_BUSY = (408, 429, 502, 503)
SETTLE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What is there after a run: of server and worker together, and of the machine's temporary folder."""

    run: int
    seconds: float
    state: str
    memory_mib: float
    server_mib: float
    worker_mib: float
    processes: int
    open_files: int
    ports: int
    temporary: int
    slots: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="traceforge-soak-") as folder, serving(Path(folder)) as (api, home):
        samples = [sample(api, home, Path(folder), number) for number in range(options.runs + 1)]
    figures = summary(samples)
    if options.json:
        print(json.dumps({"figures": figures, "samples": [asdict(each) for each in samples]}))
    else:
        for name, value in figures.items():
            print(f"{name:<28} {value}")
    leaks = [name for name, value in figures.items() if name.endswith("left over") and value]
    if leaks or figures["open files a run"] > 0.1 or figures["runs not completed"]:
        sys.exit(f"Leaks, or runs that did not end well: {', '.join(leaks) or 'see above'}")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, Path]]:
    """Server and worker, with TMPDIR in a folder of their own. Gives the API's address and PREFECT_HOME."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    home = folder / "prefect"
    (folder / "tmp").mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {"PREFECT_HOME": str(home), "PREFECT_SERVER_API_PORT": str(port), "PYTHONPATH": str(ROOT)}
    env |= {"TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "deployments.serve"]
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "prefect deployment run" in line:
                break
        try:
            yield f"http://127.0.0.1:{port}/api", home
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


def sample(api: str, home: Path, folder: Path, number: int) -> Sample:
    """One run to its end, then what is there. Number 0 is without a run."""
    started = time.monotonic()
    state = one_run(api, folder / "runs") if number else "Completed"
    seconds = time.monotonic() - started
    deadline = time.monotonic() + SETTLE_SECONDS
    while at_work(home) and time.monotonic() < deadline:  # the run's own process says goodbye
        time.sleep(0.2)
    processes = of_site(home)
    memory, files, ports = {"server": 0.0, "worker": 0.0, "": 0.0}, 0, set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            which = next((name for name in ("server", "worker") if [name, "start"] == words[3:5]), "")
            memory[which] += process.memory_full_info().pss / 2**20
            files += process.num_fds()
            listening = (each for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN)
            ports |= {each.laddr.port for each in listening}
    limit = asked("GET", f"{api}/v2/concurrency_limits/gpu")
    temporary = len(list((folder / "tmp").iterdir()))
    slots = limit["active_slots"]
    each = (sum(memory.values()), memory["server"], memory["worker"])
    taken = Sample(number, seconds, state, *each, len(processes), files, len(ports), temporary, slots)
    print(json.dumps(asdict(taken)), file=sys.stderr, flush=True)
    return taken


def one_run(api: str, runs_dir: Path) -> str:
    """Start the deployment `ingest` and wait for its end. Returns its state."""
    found = asked("GET", f"{api}/deployments/name/traceforge/ingest")
    parameters = {"run": "new", "runs_dir": str(runs_dir), "refresh": True}
    where = f"{api}/deployments/{found['id']}/create_flow_run"
    started = asked("POST", where, {"parameters": parameters})["id"]
    while (state := asked("GET", f"{api}/flow_runs/{started}")["state_name"]) not in ENDED:
        time.sleep(0.5)
    return str(state)


def asked(method: str, url: str, body: Any = None) -> Any:
    """What the server answers. Tries again where it is too busy (503), as Prefect's own client does; ends the soak with
    the server's words where it refuses."""
    for seconds in (1, 2, 4, 8, 16, 0):
        answer = httpx.request(method, url, json=body, timeout=60)
        if answer.status_code not in TOO_BUSY or not seconds:
            break
        print(json.dumps({"busy": answer.status_code, "url": url}), file=sys.stderr, flush=True)
        time.sleep(seconds)
    if answer.is_error:
        sys.exit(f"{method} {url}: {answer.status_code} {answer.text}")
    return answer.json()


def at_work(home: Path) -> bool:
    """Whether a process of a run is there still."""
    for process in of_site(home):
        with contextlib.suppress(psutil.Error):
            if "prefect.engine" in process.cmdline():
                return True
    return False


def of_site(home: Path) -> list[psutil.Process]:
    """`make serve` itself, server, worker, and whatever they started: all have this PREFECT_HOME."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("PREFECT_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def summary(samples: list[Sample]) -> dict[str, float]:
    """First and last figures, growth a run over the second half, and what is left over."""
    half = samples[len(samples) // 2 :]

    def growth(values: list[float]) -> float:
        return round(float(np.polyfit(range(len(values)), values, 1)[0]), 3) if len(values) > 1 else 0.0

    first, last = samples[0], samples[-1]
    return {
        "runs": len(samples) - 1,
        "runs not completed": sum(each.state != "Completed" for each in samples),
        "seconds a run": round(float(np.median([each.seconds for each in samples[1:] or samples])), 1),
        "memory before, MiB": round(first.memory_mib, 1),
        "memory half-way, MiB": round(half[0].memory_mib, 1),
        "memory after, MiB": round(last.memory_mib, 1),
        "memory a run, MiB": growth([each.memory_mib for each in half]),
        "of the server": growth([each.server_mib for each in half]),
        "of the worker": growth([each.worker_mib for each in half]),
        "open files before": first.open_files,
        "open files after": last.open_files,
        "open files a run": growth([float(each.open_files) for each in half]),
        "processes left over": last.processes - first.processes,
        "ports left over": last.ports - first.ports,
        "temporary files left over": last.temporary - first.temporary,
        "slots left over": last.slots,
    }


if __name__ == "__main__":
    main()
