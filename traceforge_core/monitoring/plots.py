"""Plots of what the samplers wrote, as PNG beside the CSV.

    paths = draw_plots(run.path / "monitoring")

Time runs over all sampled time: where a run was continued later, the sessions follow each other, a dashed line between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from traceforge_core.monitoring import gpu, host
from traceforge_core.monitoring.csvlog import read_rows

Row = dict[str, str]


def draw_plots(folder: Path) -> list[Path]:
    """Draw what there are CSVs with rows for: `nvidia_smi_monitor.png`, `host_monitor.png`. Returns those drawn."""
    drawn = []
    gpu_panels = (
        ("memory_used_mib", "memory used (MiB)"),
        ("util_gpu", "GPU busy (%)"),
        ("power_draw_w", "power (W)"),
        ("temp_c", "temperature (°C)"),
    )
    if rows := list(read_rows(folder / gpu.FILE_NAME)):
        drawn.append(_draw(folder / gpu.FILE_NAME, rows, lambda row: f"GPU {row['gpu_index']}", gpu_panels))
    host_panels = (("cpu_percent", "CPU (%, 100 = one core)"), ("rss_mib", "resident memory (MiB)"))
    if rows := list(read_rows(folder / host.FILE_NAME)):
        drawn.append(_draw(folder / host.FILE_NAME, rows, lambda row: f"{row['command']} ({row['pid']})", host_panels))
    return drawn


def _draw(csv: Path, rows: list[Row], name: Callable[[Row], str], panels: Sequence[tuple[str, str]]) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    times, breaks = _continuous_time(rows)
    figure = Figure(figsize=(9, 2.2 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), sharex=True)
    colours = {title: f"C{index % 10}" for index, title in enumerate(dict.fromkeys(map(name, rows)))}
    for axis, (column, label) in zip(axes, panels, strict=True):
        lines: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for at, row in zip(times, rows, strict=True):
            if row[column]:
                xs, ys = lines[name(row)]
                xs.append(at)
                ys.append(float(row[column]))
        for title, (xs, ys) in lines.items():
            axis.plot(xs, ys, color=colours[title], linewidth=1.2, marker="." if len(xs) < 3 else None)
        for at in breaks:
            axis.axvline(at, linestyle="--", linewidth=0.8, color="grey")
        axis.set_ylabel(label, fontsize=8)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    if len(colours) <= 24:
        handles = [Line2D([], [], color=colour, label=title) for title, colour in colours.items()]
        figure.legend(handles=handles, fontsize=7, loc="outside right upper")
    axes[-1].set_xlabel("sampled time (s)")
    path = csv.with_suffix(".png")
    figure.savefig(path, dpi=110)
    return path


def _continuous_time(rows: list[Row]) -> tuple[list[float], list[float]]:
    """elapsed_s starts again at 0 with every session: where it falls, a session follows the one before."""
    times: list[float] = []
    breaks: list[float] = []
    offset = before = 0.0
    for row in rows:
        elapsed = float(row["elapsed_s"])
        if elapsed < before:
            offset += before
            breaks.append(offset)
        before = elapsed
        times.append(offset + elapsed)
    return times, breaks
