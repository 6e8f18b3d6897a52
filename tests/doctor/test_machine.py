"""What is read of the machine: a driver that answers, one that does not, too little disk and memory."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from traceforge_core.doctor import machine
from traceforge_core.doctor.machine import Gpu


class NvmlError(Exception):
    pass


def nvml(**changes: Any) -> Any:
    """A stand-in for pynvml with one 24 GB card; this machine has no driver to ask."""
    memory = SimpleNamespace(total=24564 * 2**20, free=24000 * 2**20)
    answers = {
        "NVMLError": NvmlError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.65.06",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 13010,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: memory,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (8, 6),
        "nvmlDeviceGetName": lambda handle: "NVIDIA GeForce RTX 3090",
    }
    return SimpleNamespace(**answers | changes)


def failing(message: str) -> Any:
    def fail(*_arguments: Any) -> None:
        raise NvmlError(message)

    return fail


def test_a_card_is_read_with_driver_cuda_and_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    gpus, broken = machine.read_gpus()
    assert broken is None
    assert gpus == [Gpu(0, "NVIDIA GeForce RTX 3090", 24564, 24000, (8, 6), "580.65.06", "13.1")]
    (seen, *_) = machine.look_at_gpus(gpus)
    assert seen.status == "ok" and "24.0 GiB" in seen.what and "bf16 yes" in seen.what


def test_a_driver_that_does_not_answer_is_a_problem_and_none_at_all_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=failing("Driver/library version mismatch")))
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    gpus, broken = machine.read_gpus()
    assert gpus == [] and broken is not None
    assert broken.status == "problem" and "mismatch" in broken.what and "restart" in broken.do
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    if not Path("/proc/driver/nvidia").exists():
        assert machine.read_gpus() == ([], None)


def test_nvml_that_breaks_off_halfway_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetMemoryInfo=failing("GPU is lost")))
    gpus, broken = machine.read_gpus()
    assert gpus == [] and broken is not None and "GPU is lost" in broken.what


def test_too_little_disk_and_memory_are_warnings_with_a_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "DISK_GIB_WITHOUT", 10**6)
    monkeypatch.setattr(machine, "_cgroup_limit", lambda: 2 * 2**30)
    found = {finding.subject: finding for finding in machine.look_at_host([], tmp_path / "not" / "there")}
    assert found["disk"].status == "warning" and "--runs-dir" in found["disk"].do
    assert found["disk"].figures["folder"] == str(tmp_path)
    assert found["host memory"].status == "warning" and "limited to 2.0 GiB" in found["host memory"].what


def test_two_gpus_want_host_memory_for_layer_inputs_and_shared_memory_for_nccl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus = [Gpu(index, "Card", 24564, 24000, (8, 9), "580", "13.0") for index in range(2)]
    monkeypatch.setattr(machine, "_cgroup_limit", lambda: 16 * 2**30)
    monkeypatch.setattr(machine, "SHM_MIB_FOR_NCCL", 10**9)
    found = {finding.subject: finding for finding in machine.look_at_host(gpus, tmp_path)}
    assert "datasets.preference.max_length" in found["host memory"].do
    assert "--shm-size" in found["/dev/shm"].do
