"""The GPU sampler, against a fake NVML module and a fake nvidia-smi; for real where there is a card."""

from __future__ import annotations

import os
import stat
import sys
import threading
import types
from pathlib import Path
from types import SimpleNamespace

import pytest

from traceforge_core.monitoring import gpu
from traceforge_core.monitoring.csvlog import read_rows

HEADER = "ts,elapsed_s,gpu_index,memory_used_mib,memory_total_mib,util_gpu,util_mem,power_draw_w,temp_c"


class NVMLError(Exception):
    pass


def fake_nvml(cards: list[dict[str, object]]) -> types.ModuleType:
    """A pynvml with these cards; a field that is absent raises NVMLError, as NOT_SUPPORTED does."""
    module = types.ModuleType("pynvml")

    def field(name: str):
        def ask(handle: dict[str, object], *_: object) -> object:
            if name not in handle:
                raise NVMLError("Not Supported")
            return handle[name]

        return ask

    module.__dict__.update(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        nvmlMemory_v2=2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(cards),
        nvmlDeviceGetHandleByIndex=lambda index: cards[index],
        nvmlDeviceGetMemoryInfo=field("memory"),
        nvmlDeviceGetUtilizationRates=field("rates"),
        nvmlDeviceGetPowerUsage=field("power"),
        nvmlDeviceGetTemperature=field("temperature"),
    )
    return module


FULL_CARD = {
    "memory": SimpleNamespace(used=3 * 2**30, total=24 * 2**30),
    "rates": SimpleNamespace(gpu=97, memory=41),
    "power": 251_340,
    "temperature": 66,
}


def watch_until(folder: Path, rows: int, interval: float = 0.05) -> list[dict[str, str]]:
    """Run the sampler until its CSV has that many rows, then stop it and return them all."""
    stop = threading.Event()
    thread = threading.Thread(target=gpu.watch, args=(folder, interval, stop, os.getpid()))
    thread.start()
    try:
        for _ in range(400):
            if len(list(read_rows(folder / gpu.FILE_NAME))) >= rows:
                break
            stop.wait(0.02)
    finally:
        stop.set()
        thread.join(timeout=10)
    assert not thread.is_alive()
    return list(read_rows(folder / gpu.FILE_NAME))


def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # `import pynvml` raises ImportError


def fake_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    no_nvml(monkeypatch)
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n" + script)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def test_every_card_gets_a_row_with_all_fields_from_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([FULL_CARD, FULL_CARD]))
    rows = watch_until(tmp_path, 4)
    assert (tmp_path / "nvidia_smi_monitor.csv").read_text().splitlines()[0] == HEADER
    assert [row["gpu_index"] for row in rows[:4]] == ["0", "1", "0", "1"]
    assert rows[0]["memory_used_mib"] == "3072" and rows[0]["memory_total_mib"] == "24576"
    assert (rows[0]["util_gpu"], rows[0]["util_mem"]) == ("97", "41")
    assert (rows[0]["power_draw_w"], rows[0]["temp_c"]) == ("251.34", "66")
    assert float(rows[2]["elapsed_s"]) > float(rows[0]["elapsed_s"]) >= 0


def test_a_field_that_a_card_does_not_report_is_an_empty_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unified_memory_card = {"rates": SimpleNamespace(gpu=5, memory=0)}
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([unified_memory_card]))
    row = watch_until(tmp_path, 1)[0]
    assert row["memory_used_mib"] == row["memory_total_mib"] == row["power_draw_w"] == row["temp_c"] == ""
    assert (row["util_gpu"], row["util_mem"]) == ("5", "0")


def test_without_nvml_the_command_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(
        tmp_path,
        monkeypatch,
        'echo "0, 812, 24576, 33, 7, 120.55, 51"\necho "1, [N/A], [N/A], 0, 0, [Not Supported], 48"\n',
    )
    rows = watch_until(tmp_path, 2)
    assert rows[0] | {"ts": "", "elapsed_s": ""} == {
        "ts": "", "elapsed_s": "", "gpu_index": "0", "memory_used_mib": "812", "memory_total_mib": "24576",
        "util_gpu": "33", "util_mem": "7", "power_draw_w": "120.55", "temp_c": "51",
    }  # fmt: skip
    assert rows[1]["memory_used_mib"] == rows[1]["power_draw_w"] == "" and rows[1]["temp_c"] == "48"


def test_a_sample_that_fails_is_left_out_and_sampling_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_smi(
        tmp_path,
        monkeypatch,
        f'cd "{tmp_path}"\necho x >> calls\n[ $(wc -l < calls) -eq 2 ] && exit 9\necho "0, 1, 2, 3, 4, 5.0, 6"\n',
    )
    assert len(watch_until(tmp_path, 2)) >= 2
    assert len([record for record in caplog.records if "GPU sample left out" in record.message]) == 1


def test_a_machine_without_gpus_is_told_at_once_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_nvml(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.watch(tmp_path / "monitoring", 1.0, threading.Event(), os.getpid()) is False
    assert not (tmp_path / "monitoring").exists()
    assert gpu.gpu_count() == 0


def test_a_second_session_appends_and_a_torn_row_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([FULL_CARD]))
    first = watch_until(tmp_path, 2)
    with (tmp_path / gpu.FILE_NAME).open("a") as file:
        file.write("2026-01-01T00:00:00.000+00:00,9.0,0,30")  # killed in the middle of a row
    second = watch_until(tmp_path, len(first) + 1)
    assert second[: len(first)] == first
    assert (tmp_path / gpu.FILE_NAME).read_text().count(HEADER) == 1
    assert all(row["memory_total_mib"] == "24576" for row in second)


def test_a_full_disk_ends_the_sampling_with_a_warning_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([FULL_CARD]))
    (tmp_path / gpu.FILE_NAME).symlink_to("/dev/full")
    assert gpu.watch(tmp_path, 0.05, threading.Event(), os.getpid()) is True
    assert "GPU monitor stopped" in caplog.text and "No space left" in caplog.text


@pytest.mark.gpu
def test_a_real_card_reports_its_memory(tmp_path: Path) -> None:
    if gpu.gpu_count() == 0:
        pytest.skip("no GPU here")
    rows = watch_until(tmp_path, gpu.gpu_count())
    assert int(rows[0]["memory_total_mib"]) > 1000
