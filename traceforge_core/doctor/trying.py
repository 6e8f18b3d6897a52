"""Tries one thing in a process of its own, and makes a finding of whatever comes of it: an answer, a crash, a hang.

trial = run_trial("NF4", limit_seconds=60)      # one of the names in trials.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Trial:
    """How a trial went. `ok` False: `what` says why it does not work here."""

    name: str
    ok: bool
    what: str
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)


def run_trial(name: str, limit_seconds: float, env: dict[str, str] | None = None) -> Trial:
    """Try one thing in a child process, which is ended (with all it started) after the limit."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "traceforge_core.doctor.trials", name],
        env=_environment() | (env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Trial(name, False, f"no answer within {limit_seconds:g} s", round(time.monotonic() - started, 1))
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    seconds = round(time.monotonic() - started, 1)
    last = (out.strip().splitlines() or [""])[-1]
    try:
        answer = json.loads(last)
        return Trial(name, answer["ok"], answer["what"], seconds, answer["figures"])
    except (ValueError, KeyError, TypeError):
        how = (
            f"was ended by {signal.Signals(-process.returncode).name}"
            if process.returncode < 0
            else (f"ended with exit status {process.returncode}")
        )
        said = (err.strip().splitlines() or ["it said nothing"])[-1]
        return Trial(name, False, f"the process {how}: {said}", seconds)


def _environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TOKENIZERS_PARALLELISM": "false"}
