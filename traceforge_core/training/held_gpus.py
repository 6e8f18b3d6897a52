"""One run a GPU on this machine: a lock on a file for each card, held while workers use it.

    with held(["0", "1"], stop_file):
        ...

Prefect's limit `gpu` counts slots; it does not say which card, it knows nothing of `traceforge run` in a terminal, and
a server that was away for minutes forgets who held what. The kernel gives these locks back when their process ends,
however it ends. Containers with a /tmp of their own do not see each other's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from traceforge_core.errors import TraceForgeError
from traceforge_core.processes.claim import holder, take
from traceforge_core.runs.stopping import StoppedByFile

logger = logging.getLogger(__name__)
FOLDER = "traceforge-gpus"
WAIT_SECONDS = 12 * 3600.0
POLL_SECONDS = 0.5


def free_first(gpus: Sequence[str]) -> list[str]:
    """The same GPUs, those that no run is using in front."""
    used = {gpu: _is_used(gpu) for gpu in gpus}
    return sorted(gpus, key=lambda gpu: used[gpu])


@contextlib.contextmanager
def held(gpus: Sequence[str], stop_file: Path | None = None) -> Iterator[None]:
    """Have these GPUs for this process inside the block; waits for those that another run is using.

    "" is the CPU, of which there is enough. Raises StoppedByFile where the stop file appears while it waits,
    TraceForgeError where a card does not come free within 12 hours.
    """
    names = sorted({gpu for gpu in gpus if gpu}, key=_identity)  # all in one order, so that none wait in a circle
    with contextlib.ExitStack() as stack:
        for gpu in names:
            _wait_for(gpu, stack.enter_context(_open(gpu)), stop_file)
        yield


def _wait_for(gpu: str, file: IO[str], stop_file: Path | None) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    told = False
    while not take(file):
        if not told:
            logger.info("GPU %s is being used by a run of process %s: waiting for it.", gpu, holder(file))
            told = True
        if stop_file is not None and stop_file.exists():
            raise StoppedByFile(f"stopped while waiting for GPU {gpu}, because {stop_file} is there.")
        if time.monotonic() > deadline:
            raise TraceForgeError(
                f"GPU {gpu} did not come free in {WAIT_SECONDS / 3600:.0f} hours: process {holder(file)} is using it. "
                "Wait for that run or stop it (traceforge stop), and run the stage again."
            )
        time.sleep(POLL_SECONDS)


def _is_used(gpu: str) -> bool:
    with _open(gpu) as file:
        return not take(file)


def _open(gpu: str) -> IO[str]:
    """The card's lock file, which every user of the machine may lock."""
    folder = Path(tempfile.gettempdir(), FOLDER)
    folder.mkdir(exist_ok=True)
    path = folder / re.sub(r"[^A-Za-z0-9_.-]", "_", _identity(gpu))
    # In a folder that everybody may write to, a link would lead to somebody else's file.
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+", encoding="utf-8")
    with contextlib.suppress(PermissionError):  # whoever made them has opened them to all
        folder.chmod(0o1777)
        path.chmod(0o666)
    return file


def _identity(gpu: str) -> str:
    """One name for a card, whether it was named by number or otherwise."""
    if not gpu.isdigit():
        return gpu
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(int(gpu))))
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no driver, no such card: the number will do
        return gpu
