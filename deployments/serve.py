"""Server, work pool, worker and all deployments on this machine, until Ctrl-C: `make serve`, or

    python -m deployments.serve

Listens on loopback only, port 4200 (another with PREFECT_SERVER_API_PORT). The database lies in PREFECT_HOME, else in
`.prefect` in the checkout, or in PostgreSQL where PREFECT_SERVER_DATABASE_CONNECTION_URL names one; logs of server and
worker lie beside it. The first Ctrl-C lets runs that are at work finish, the second ends them. However this program
ends, SIGKILL included, server and worker end with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import psutil

from deployments.setup import POOL
from flows.embedded import prefect_home
from traceforge_core.errors import TraceForgeError

CHECKOUT = Path(__file__).parents[1]
START_SECONDS = 120.0
STOP_SECONDS = 15.0


def main() -> int:
    """Serve until a signal. Returns the exit status."""
    asked = _count_signals()
    port = int(os.environ.get("PREFECT_SERVER_API_PORT", "4200"))
    home = prefect_home()
    env = _environment(port, home)
    try:
        _tell("Starting the Prefect server ...")
        with _child("server", ["server", "start", "--host", "127.0.0.1", "--port", str(port)], env, home) as server:
            _wait_until_up(server, port, home, asked)
            _tell("Setting up the work pool, the limit, the automations and the deployments (half a minute) ...")
            _run([sys.executable, "-m", "deployments.setup"], env)
            deploy = ["--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml"]
            _run([sys.executable, "-m", "prefect", *deploy], env)
            with _child(
                "worker", ["worker", "start", "--pool", POOL, "--name", socket.gethostname()], env, home
            ) as worker:
                _tell(_how_to_use(port))
                while not asked:
                    for name, process in (("server", server), ("worker", worker)):
                        if process.poll() is not None:
                            raise TraceForgeError(f"The {name} ended by itself. Its log: {home / f'{name}.log'}")
                    time.sleep(0.2)
                _drain(worker, asked)
    except _Stopped:
        pass
    except TraceForgeError as error:
        _tell(f"make serve: {error}")
        return 1
    _tell("Stopped.")
    return 0


class _Stopped(Exception):
    """A signal came before everything was up."""


def _count_signals() -> list[int]:
    """A list that grows with every Ctrl-C or SIGTERM."""
    asked: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    return asked


def _environment(port: int, home: Path) -> dict[str, str]:
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            _tell(
                f"make serve: port {port} is taken, perhaps by another Prefect server. Stop that one, or choose "
                "another port with PREFECT_SERVER_API_PORT."
            )
            raise SystemExit(1) from None
    home.mkdir(parents=True, exist_ok=True)
    return os.environ | {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_API_HOST": "127.0.0.1",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        # In memory, the default, a restarted server would forget who holds GPUs and never give their slots back.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_WORKER_QUERY_SECONDS": "3",
        "PREFECT_CLI_PROMPT": "false",
    }


@contextlib.contextmanager
def _child(name: str, arguments: list[str], env: Mapping[str, str], home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Prefect process in a session of its own, so that Ctrl-C reaches only this program, which ends it in order."""
    with (home / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "traceforge_core.processes.bound", str(os.getpid()), "-m", "prefect", *arguments],
            cwd=CHECKOUT,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _end_tree(process)


def _wait_until_up(server: subprocess.Popen[bytes], port: int, home: Path, asked: list[int]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        if asked:
            raise _Stopped
        with contextlib.suppress(urllib.error.URLError, OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=10) as answer:
                if answer.status == 200:
                    return
        time.sleep(0.2)
    raise TraceForgeError(f"The Prefect server did not come up. Its log: {home / 'server.log'}")


def _run(command: list[str], env: Mapping[str, str]) -> None:
    done = subprocess.run(command, cwd=CHECKOUT, env=dict(env), capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise TraceForgeError(f"`{' '.join(command[1:])}` failed:\n{done.stdout}{done.stderr}")


def _drain(worker: subprocess.Popen[bytes], asked: list[int]) -> None:
    """Let the worker finish its runs; a second signal ends them."""
    worker.terminate()
    if psutil.Process(worker.pid).children():
        _tell("Waiting for the runs at work to finish. Ctrl-C again ends them.")
    while worker.poll() is None and len(asked) < 2:
        time.sleep(0.2)


def _end_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to a process and all below it, SIGKILL to what is left after a while."""
    try:
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        process.wait()
        return
    for each in reversed(tree):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.terminate()
    _, left = psutil.wait_procs(tree, timeout=STOP_SECONDS)
    for each in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def _how_to_use(port: int) -> str:
    return f"""
TraceForge is being served: http://127.0.0.1:{port}  (Ctrl-C stops it)

In another shell:
    export PREFECT_API_URL=http://127.0.0.1:{port}/api
    .venv/bin/prefect deployment run traceforge/full-pipeline
"""


def _tell(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
