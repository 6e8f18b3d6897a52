"""A trial that works, is wrong, crashes, hangs or leaves without a word: each is a finding, never an exception."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.python_path import python_path
from traceforge_core.doctor.trials import run_trial

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


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["math", "flash"])
def test_attention_kernels_agree_with_the_formula_on_this_machine(kernel: str) -> None:
    trial = run_trial(f"attention: {kernel}", 120)
    assert trial.ok, trial.what
    assert trial.figures["error"] < 3e-2


@pytest.mark.slow
def test_two_processes_really_add_up_over_gloo() -> None:
    trial = run_trial("gloo", 120)
    assert trial.ok, trial.what
    assert "over gloo" in trial.what


@pytest.mark.slow
def test_gloo_over_an_interface_that_is_not_there_is_a_finding() -> None:
    trial = run_trial("gloo", 120, {"GLOO_SOCKET_IFNAME": "nosuch0"})
    assert not trial.ok
    assert "nosuch0" in trial.what


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_trial_at_once_instead_of_leaving_its_peer_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    started = time.monotonic()
    trial = run_trial("NCCL", 60)
    assert not trial.ok
    assert time.monotonic() - started < 30
    assert re.search(r"rank [01] failed: \w+", trial.what)
