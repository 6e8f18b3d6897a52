"""A process that never outlives the one that started it, however that one ends (Linux).

    python -m traceforge_core.processes.bound PARENT_PID -m prefect server start   # any Python program, by its parent
    end_with(parent_pid)                                                           # in a program's own main()
    adopt_orphans()                                                                # in a parent of such

The kernel watches the *thread* that started the process, so start it from one that lives long enough.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. Ends at once where that is dead already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent dies. Whoever asks for it has to wait for
    them."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])  # what was asked of the kernel outlives an exec
