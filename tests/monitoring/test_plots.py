"""Plots drawn from CSVs such as the samplers leave."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from traceforge_core.monitoring import gpu, host
from traceforge_core.monitoring.csvlog import CsvLog
from traceforge_core.monitoring.plots import _continuous_time, draw_plots


def write_gpu_csv(folder: Path, elapsed: list[float]) -> None:
    with CsvLog(folder / gpu.FILE_NAME, gpu.COLUMNS) as rows:
        for at in elapsed:
            for card in (0, 1):
                rows.row({"ts": "2026-01-01T00:00:00.000+00:00", "elapsed_s": at, "gpu_index": card,
                          "memory_used_mib": 1000 + 10 * at, "util_gpu": 50})  # fmt: skip


def test_a_plot_is_drawn_for_each_csv_with_rows(tmp_path: Path) -> None:
    write_gpu_csv(tmp_path, [0.0, 2.0, 4.0, 0.0, 2.0])
    with CsvLog(tmp_path / host.FILE_NAME, host.COLUMNS):
        pass
    assert [path.name for path in draw_plots(tmp_path)] == ["nvidia_smi_monitor.png"]
    with Image.open(tmp_path / "nvidia_smi_monitor.png") as picture:
        assert picture.format == "PNG" and picture.width > 800
        assert len(picture.convert("RGB").getcolors(maxcolors=1 << 20)) > 50, "there are lines on it"


def test_host_rows_are_drawn_a_line_a_process(tmp_path: Path) -> None:
    with CsvLog(tmp_path / host.FILE_NAME, host.COLUMNS) as rows:
        for at in (0.0, 2.0):
            rows.row({"ts": "t", "elapsed_s": at, "pid": 7, "command": "worker", "cpu_percent": 90, "rss_mib": 300})
    assert [path.name for path in draw_plots(tmp_path)] == ["host_monitor.png"]


def test_nothing_is_drawn_where_nothing_was_sampled(tmp_path: Path) -> None:
    assert draw_plots(tmp_path) == []


def test_sessions_follow_each_other_in_time() -> None:
    rows = [{"elapsed_s": at} for at in ("0.0", "5.0", "0.0", "3.0")]
    assert _continuous_time(rows) == ([0.0, 5.0, 5.0, 8.0], [5.0])
