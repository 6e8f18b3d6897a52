"""What the trials find on this machine: kernels that are right, processes that reach each other or do not."""

from __future__ import annotations

import re
import time

import pytest

from traceforge_core.doctor.trying import run_trial


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
