"""The Prefect API for a command: the one that is configured (PREFECT_API_URL, a profile), else one of our own.

    with embedded_api() as pid:          # pid of our own server, None where a configured one is used
        traceforge(...)

Our own server lives as long as the `with` block: SQLite in PREFECT_HOME (default: `.prefect` in the checkout), a free
loopback port, no UI, no telemetry. It has a session of its own, so Ctrl-C at the terminal ends the flow and not the
server that the flow has to report to, and the kernel ends it if its parent is killed. Where it ends before the block,
the block is stopped as by Ctrl-C, and ServerEnded is raised in the main thread.
"""

from __future__ import annotations

import contextlib
import contextvars
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from traceforge_core.errors import TraceForgeError
from traceforge_core.paths import written
from traceforge_core.processes.bound import end_with
from traceforge_core.runs import not_written

log = logging.getLogger(__name__)

START_SECONDS = 120.0
WATCH_SECONDS = 0.2
SEND_SECONDS = 30.0  # at most, for the last lines and events: far more than it takes, even on a busy machine
QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # the command line has its own lines; the API still gets all
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}

_ended_early = threading.Event()


class ServerEnded(TraceForgeError):
    """Our own server ended while it was needed."""


def prefect_home() -> Path:
    """Where Prefect keeps its database: PREFECT_HOME, else `.prefect` in the checkout."""
    return written(os.environ.get("PREFECT_HOME") or Path(__file__).parents[1] / ".prefect").resolve()


def open_in(home: Path, name: str) -> IO[str]:
    """Open a file in that folder, made where it is not there, to read and append. Raises TraceForgeError where the
    folder cannot be written to."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        return (home / name).open("a+")
    except OSError as error:
        cure = "Choose another folder with the environment variable PREFECT_HOME."
        raise not_written(error, f"write to {home}, where Prefect keeps its database", cure) from None


@contextlib.contextmanager
def embedded_api() -> Iterator[int | None]:
    """Have a Prefect API inside the block. Raises TraceForgeError where our own server does not come up, ServerEnded
    where it ends before the block does."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_HOME,
        PREFECT_SERVER_ALLOW_EPHEMERAL_MODE,
        temporary_settings,
    )

    if url := PREFECT_API_URL.value():
        _check_configured(url)
        yield None
        return
    home = prefect_home()
    starting = _alone_in(home)
    server = _start(home)
    try:
        import flows.pipeline  # noqa: F401  (a second or two of imports, while the server starts)

        _wait_until_up(server)
        starting.close()
        own = {PREFECT_API_URL: server.url, PREFECT_HOME: home, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False}
        with temporary_settings(updates=own), _watched(server):
            try:
                yield server.process.pid
            finally:
                if server.process.poll() is None:
                    _send_what_waits()
    finally:
        starting.close()
        server.process.terminate()
        try:
            server.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()


def leave(status: int) -> NoReturn:
    """End this process. At once where our server ended early: at exit Prefect would try for minutes to send it what it
    had for it."""
    if _ended_early.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


@dataclass(frozen=True)
class _Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path
    log_begins: int
    """Bytes that earlier servers left in the log."""

    def ending(self) -> str:
        """How it ended, and what it said last."""
        status = self.process.returncode
        how = f"ended with exit status {status}"
        if status < 0:
            short = ", as the kernel does where memory is short" if status == -signal.SIGKILL else ""
            how = f"was killed by {signal.Signals(-status).name}{short}"
        return f"Prefect's embedded server {how}. {self.last_words()}"

    def last_words(self) -> str:
        """What it said last, as a sentence."""
        lines = []
        with contextlib.suppress(OSError), self.log.open("rb") as file:  # the folder may be gone, and be why it ended
            file.seek(self.log_begins)
            lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
        return f'Its log, {self.log}, ends with "{lines[-1].strip()}".' if lines else f"It left no word in {self.log}."


@contextlib.contextmanager
def _watched(server: _Server) -> Iterator[None]:
    """Stop the block when the server ends: without one Prefect tries again for minutes, and then fails in some way."""
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_SECONDS):
            if server.process.poll() is not None:
                _ended_early.set()
                settings.client.max_retries = 0  # what the flow still has to report need not be tried again and again,
                logging.raiseExceptions = False  # nor be complained of
                for handler in logging.getLogger("prefect._internal").handlers:
                    handler.setLevel(logging.CRITICAL)
                log.error("Prefect's embedded server is gone.")
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return

    # With these settings: its line goes to this server too, and without them Prefect would start another for it.
    watcher = threading.Thread(target=contextvars.copy_context().run, args=(watch,), daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            over.set()
            watcher.join()
    except BaseException as error:
        with contextlib.suppress(subprocess.TimeoutExpired):  # a lost connection is noticed first
            server.process.wait(timeout=WATCH_SECONDS)
            _ended_early.set()
            raise ServerEnded(server.ending()) from error
        raise


def _check_configured(url: str) -> None:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        if (problem := client.api_healthcheck()) is not None:
            raise TraceForgeError(
                f"The Prefect API at {url} does not answer ({problem}). Start that server, or unset PREFECT_API_URL "
                "(in the environment and in your Prefect profile) to use an embedded one."
            )


def _alone_in(home: Path) -> IO[str]:
    """Wait until no other process is starting a server on this folder; hold it until the returned file is closed. Two
    servers that both make the database's tables at the first start would trip over each other."""
    file = open_in(home, ".starting")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _start(home: Path) -> _Server:
    path = home / "server.log"
    env = os.environ | {
        "PREFECT_HOME": str(home),
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
        # A server that remembered leases only in memory would leave their slots taken for ever where it is killed.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
        "TRACEFORGE_PARENT": str(os.getpid()),
    }
    # The listening socket is handed over, so that no other program can take the port in between.
    with path.open("ab") as output, _listener() as listener:
        begins = path.stat().st_size
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.embedded", str(listener.fileno())],
            env=env
            | {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), env.get("PYTHONPATH")]))},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        return _Server(process, f"http://127.0.0.1:{listener.getsockname()[1]}/api", path, begins)


def _listener() -> socket.socket:
    """A listening socket on a free loopback port, which can be reached."""
    try:
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        socket.create_connection(listener.getsockname(), timeout=5).close()
    except OSError as error:
        raise TraceForgeError(
            f"This machine cannot reach itself at 127.0.0.1 ({error}), where Prefect's embedded server would listen. "
            "Switch the loopback interface on (ip link set lo up), or name a Prefect API with PREFECT_API_URL."
        ) from None
    return listener


def _send_what_waits() -> None:
    """Prefect sends log lines and events in the background: have them sent while the server is still there."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=SEND_SECONDS)
    EventsWorker.drain_all(timeout=SEND_SECONDS)


def _wait_until_up(server: _Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerEnded(f"{server.ending()} Try again, or name another Prefect API with PREFECT_API_URL.")
        with contextlib.suppress(urllib.error.URLError, OSError):
            with urllib.request.urlopen(f"{server.url}/health", timeout=10) as answer:
                if answer.status == 200:
                    return
        time.sleep(0.1)
    raise TraceForgeError(
        f"Prefect's embedded server does not answer at {server.url} after {START_SECONDS:.0f} s. {server.last_words()} "
        "Try again when the machine has less to do, or start a server of your own and name it with PREFECT_API_URL."
    )


def _serve(listener: socket.socket) -> None:
    """The server process itself."""
    end_with(int(os.environ["TRACEFORGE_PARENT"]))  # never outlive the command
    import uvicorn

    config = uvicorn.Config(
        "prefect.server.api.server:create_app", factory=True, log_level="error", lifespan="on", access_log=False
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
