"""The Prefect API for a command: the one that is configured (PREFECT_API_URL, a profile), else one of our own.

    with embedded_api() as pid:          # pid of our own server, None where a configured one is used
        traceforge(...)

Our own server lives as long as the `with` block: SQLite in PREFECT_HOME (default: `.prefect` in the checkout), a free
loopback port, no UI, no telemetry. It has a session of its own, so Ctrl-C at the terminal ends the flow and not the
server that the flow has to report to, and the kernel ends it if its parent is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from traceforge_core.errors import TraceForgeError
from traceforge_core.paths import written
from traceforge_core.processes.bound import end_with
from traceforge_core.runs import not_written

START_SECONDS = 120.0
SEND_SECONDS = 30.0  # at most, for the last lines and events: far more than it takes, even on a busy machine
QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # the command line has its own lines; the API still gets all
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}


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
    """Have a Prefect API inside the block. Raises TraceForgeError where our own server does not come up."""
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
    process, url = _start(home)
    try:
        import flows.pipeline  # noqa: F401  (a second or two of imports, while the server starts)

        _wait_until_up(process, url, home)
        starting.close()
        own = {PREFECT_API_URL: url, PREFECT_HOME: home, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False}
        with temporary_settings(updates=own):
            try:
                yield process.pid
            finally:
                if process.poll() is None:
                    _send_what_waits()
    finally:
        starting.close()
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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


def _start(home: Path) -> tuple[subprocess.Popen[bytes], str]:
    log = (home / "server.log").open("ab")
    env = os.environ | {
        "PREFECT_HOME": str(home),
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
        "TRACEFORGE_PARENT": str(os.getpid()),
    }
    # The listening socket is handed over, so that no other program can take the port in between.
    with log, socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.embedded", str(listener.fileno())],
            env=env
            | {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), env.get("PYTHONPATH")]))},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        return process, f"http://127.0.0.1:{listener.getsockname()[1]}/api"


def _send_what_waits() -> None:
    """Prefect sends log lines and events in the background: have them sent while the server is still there."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=SEND_SECONDS)
    EventsWorker.drain_all(timeout=SEND_SECONDS)


def _wait_until_up(process: subprocess.Popen[bytes], url: str, home: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
                if answer.status == 200:
                    return
        time.sleep(0.1)
    what = "did not answer" if process.poll() is None else f"ended with exit status {process.returncode}"
    last = (home / "server.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    raise TraceForgeError(
        f"Prefect's embedded server {what}. Its log: {home / 'server.log'}" + (f" ({last[0].strip()})" if last else "")
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
