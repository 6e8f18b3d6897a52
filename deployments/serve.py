"""Server, work pool, worker and all deployments on this machine, until Ctrl-C: `make serve`, or

    python -m deployments.serve

Listens on loopback only, port 4200 (another with PREFECT_SERVER_API_PORT). The database lies in PREFECT_HOME, else in
`.prefect` in the checkout, or in PostgreSQL where PREFECT_SERVER_DATABASE_CONNECTION_URL names one; logs of server and
worker lie beside it. A server or worker that ends by itself is started again, while runs go on. The first Ctrl-C lets
runs that are at work finish, the second ends them. However this program ends, SIGKILL included, server and worker end
with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from deployments.setup import POOL
from flows.embedded import open_in, prefect_home
from traceforge_core.errors import TraceForgeError
from traceforge_core.processes.bound import adopt_orphans
from traceforge_core.processes.claim import holder, take

CHECKOUT = Path(__file__).parents[1]
START_SECONDS = 120.0
STOP_SECONDS = 15.0
SHORT_LIFE_SECONDS = 30.0


def main() -> int:
    """Serve until a signal. Returns the exit status."""
    asked = _count_signals()
    try:
        port, home = _port(), prefect_home()
        with _alone(home):
            _serve(port, home, asked)
    except _Stopped:
        pass
    except TraceForgeError as error:
        _tell(f"make serve: {error}")
        return 1
    _tell("Stopped.")
    return 0


def _serve(port: int, home: Path, asked: list[int]) -> None:
    env = _environment(port, home)
    serve = ["deployments.lean", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    work = ["deployments.lean", "worker", "start", "--pool", POOL, "--name", socket.gethostname()]
    adopt_orphans()
    _tell("Starting the Prefect server ...")
    # A thread a database connection, and by itself glibc keeps freed memory apart for each of so many threads.
    with _Kept("server", serve, env | {"MALLOC_ARENA_MAX": "2"}, home) as server:
        _wait_until_up(server, port, asked)
        _tell("Setting up the work pool, the limit, the automations and the deployments (half a minute) ...")
        _run([sys.executable, "-m", "deployments.setup"], env)
        deploy = ["--no-prompt", "deploy", "--all", "--prefect-file", "deployments/prefect.yaml"]
        _run([sys.executable, "-m", "prefect", *deploy], env)
        with _Kept("worker", work, env, home) as worker:
            kept = (server, worker)
            _tell(_how_to_use(port))
            while not asked:
                if server.tend():
                    _wait_until_up(server, port, asked)  # a worker that finds no server ends
                worker.tend()
                _orphans(kept)
                time.sleep(0.2)
            _drain(worker.process, kept, asked)
            _end(_orphans(kept))


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


def _port() -> int:
    """The port to listen on, which nobody else does. Raises TraceForgeError where that is not so."""
    asked = os.environ.get("PREFECT_SERVER_API_PORT", "4200")
    try:
        port = int(asked)
        with contextlib.closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except (ValueError, OverflowError):
        raise TraceForgeError(f"PREFECT_SERVER_API_PORT is {asked!r}: give a port number, 1 to 65535.") from None
    except OSError as error:
        what = (
            "is taken, perhaps by another Prefect server. Stop that one, or" if error.errno == errno.EADDRINUSE else ""
        )
        raise TraceForgeError(
            f"port {port} {what or f'cannot be used ({error.strerror}):'} choose another port with "
            "PREFECT_SERVER_API_PORT."
        ) from None
    return port


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Have the folder of Prefect's database for this process. Raises TraceForgeError where another one serves from it
    (two servers would both start what is scheduled) or it cannot be written to."""
    with open_in(home, ".serving") as file:
        if not take(file):
            raise TraceForgeError(
                f"process {holder(file)} is serving from {home} already. Stop that one, or choose another folder "
                "with the environment variable PREFECT_HOME."
            )
        yield


def _environment(port: int, home: Path) -> dict[str, str]:
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


class _Kept:
    """A Prefect process (`program`: module and arguments) that is started again where it ends by itself: killed for
    memory, say. It has a session of its own, so that Ctrl-C reaches only this program, which ends it in order."""

    def __init__(self, name: str, program: list[str], env: Mapping[str, str], home: Path) -> None:
        self._name, self._program, self._env = name, program, dict(env)
        self.log = home / f"{name}.log"

    def __enter__(self) -> _Kept:
        self._start()
        return self

    def __exit__(self, *_error: object) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            _end([psutil.Process(self.process.pid)])
        self.process.wait()

    def tend(self) -> bool:
        """Start it again if it has ended; True where it had. Raises TraceForgeError where it does not live long enough
        to be of use."""
        status = self.process.poll()
        if status is None:
            return False
        if time.monotonic() - self._started < SHORT_LIFE_SECONDS:
            raise TraceForgeError(f"The {self._name} ended by itself. Its log: {self.log}")
        how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
        _tell(f"The {self._name} ended by itself, {how}, and is started again (its log: {self.log}).")
        self._start()
        return True

    def _start(self) -> None:
        self._started = time.monotonic()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "traceforge_core.processes.bound", str(os.getpid()), "-m", *self._program],
                cwd=CHECKOUT,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def _wait_until_up(server: _Kept, port: int, asked: list[int]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.process.poll() is None:
        if asked:
            raise _Stopped
        with contextlib.suppress(urllib.error.URLError, OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=10) as answer:
                if answer.status == 200:
                    return
        time.sleep(0.2)
    raise TraceForgeError(f"The Prefect server did not come up. Its log: {server.log}")


def _run(command: list[str], env: Mapping[str, str]) -> None:
    done = subprocess.run(command, cwd=CHECKOUT, env=dict(env), capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise TraceForgeError(f"`{' '.join(command[1:])}` failed:\n{done.stdout}{done.stderr}")


def _drain(worker: subprocess.Popen[bytes], keepers: Sequence[_Kept], asked: list[int]) -> None:
    """Let the worker finish its runs, and those of one before it; a second signal ends them."""
    worker.terminate()
    if (worker.poll() is None and psutil.Process(worker.pid).children()) or _orphans(keepers):
        _tell("Waiting for the runs at work to finish. Ctrl-C again ends them.")
    while (worker.poll() is None or _orphans(keepers)) and len(asked) < 2:
        time.sleep(0.2)


def _orphans(keepers: Sequence[_Kept]) -> list[psutil.Process]:
    """Runs whose worker died: this process has become their parent. Those that have ended are buried."""
    kept = {each.process.pid for each in keepers}
    found = []
    for child in psutil.Process().children():
        if child.pid in kept:
            continue
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)
            else:
                found.append(child)
    return found


def _end(processes: Sequence[psutil.Process]) -> None:
    """SIGTERM to processes and all below them, SIGKILL to what is left after a while."""
    tree = []
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            tree += [each, *each.children(recursive=True)]
    for each in reversed(tree):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.terminate()
    _, left = psutil.wait_procs(tree, timeout=STOP_SECONDS)
    for each in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def _how_to_use(port: int) -> str:
    return f"""
TraceForge is being served: http://127.0.0.1:{port}  (Ctrl-C stops it)

In another shell:
    export PREFECT_API_URL=http://127.0.0.1:{port}/api
    .venv/bin/prefect deployment run traceforge/full-pipeline
"""


def _tell(text: str) -> None:
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # whoever listened has gone (`make serve | head`): that is no reason to stop
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
