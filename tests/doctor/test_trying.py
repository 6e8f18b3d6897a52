"""A trial that crashes, hangs, raises or leaves without a word: each is a finding, never an exception."""

from __future__ import annotations

import time
from pathlib import Path

from tests.python_path import python_path
from traceforge_core.doctor.trying import run_trial

ROOT = Path(__file__).parents[2]


def with_package(folder: Path, name: str, code: str) -> dict[str, str]:
    """The environment of a child that finds this package instead of the installed one."""
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    return {"PYTHONPATH": python_path(folder, ROOT)}


def test_a_library_that_crashes_the_process_is_named_by_its_signal(tmp_path: Path) -> None:
    env = with_package(tmp_path, "bitsandbytes", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    trial = run_trial("NF4", 30, env)
    assert not trial.ok
    assert "SIGSEGV" in trial.what


def test_a_library_that_hangs_is_ended_after_the_limit_with_all_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, time\n"
        f"child = subprocess.Popen(['sleep', '60'])\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )
    started = time.monotonic()
    trial = run_trial("NF4", 1.5, with_package(tmp_path, "bitsandbytes", code))
    assert time.monotonic() - started < 10
    assert (trial.ok, trial.what) == (False, "no answer within 1.5 s")
    grandchild = Path("/proc") / (tmp_path / "pid").read_text()
    deadline = time.monotonic() + 5
    while (
        grandchild.exists() and "Z" not in (grandchild / "stat").read_text().split()[2] and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert not grandchild.exists() or (grandchild / "stat").read_text().split()[2] == "Z"


def test_a_library_that_leaves_the_process_shows_its_last_words(tmp_path: Path) -> None:
    trial = run_trial("NF4", 30, with_package(tmp_path, "bitsandbytes", "raise SystemExit('no licence for this')"))
    assert not trial.ok
    assert "exit status 1: no licence for this" in trial.what


def test_an_exception_is_told_with_its_type(tmp_path: Path) -> None:
    trial = run_trial("NF4", 30, with_package(tmp_path, "bitsandbytes", "raise OSError('libcudart.so.12: not found')"))
    assert (trial.ok, trial.what) == (False, "OSError: libcudart.so.12: not found")
