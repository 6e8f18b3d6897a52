"""How comparisons went over time, as trend.md, trend.html and trend.png.

write_trend(read(history), folder)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from traceforge_core.comparison.document import Bullets, Heading, Part, Picture, Table, Text, html, markdown
from traceforge_core.comparison.drift import drifts
from traceforge_core.comparison.history import SETTING, Entry, blame
from traceforge_core.comparison.plots import SMALLEST, STYLES

MARKS = {"fail": "#a40e26", "error": "#5a32a3", "undecided": "#b08800"}
SHOWN = (
    ("max loss difference", "|loss - oracle's|, largest", True),
    ("adapter difference", "adapter, relative", True),
    ("seconds a step", "seconds a step", False),
    ("held-out pairs margin", "margin on held-out pairs", False),
)
LAST_RUNS = 14


def write_trend(entries: Sequence[Entry], folder: Path) -> None:
    """Write the three files. `entries`: oldest first, at least one."""
    folder.mkdir(parents=True, exist_ok=True)
    plot_trend(entries, folder / "trend.png")
    parts = trend_parts(entries)
    (folder / "trend.md").write_text(markdown(parts), encoding="utf-8")
    (folder / "trend.html").write_text(html(parts, folder, "TraceForge: comparisons over time"), encoding="utf-8")


def trend_parts(entries: Sequence[Entry]) -> list[Part]:
    """The last run's verdict, what changed if it is bad, what drifts if it is good, the trends, and the last runs."""
    last = entries[-1]
    good = sum(entry.good for entry in entries)
    parts: list[Part] = [
        Heading("Comparisons with the oracle over time", 1),
        Text(f"Last run {last.run_id}: **{last.verdict}**. {last.reason}"),
    ]
    if change := blame(entries):
        parts.append(Bullets([change.sentence]))
    if drifting := drifts(entries):
        parts.append(Text("Still within every limit, and worse than it was:"))
        parts.append(Bullets([one.sentence for one in drifting]))
    parts += [
        Text(f"{good} of {len(entries)} runs recorded here agreed."),
        Picture("trend.png", "Differences from the oracle, time and held-out margins, run by run"),
        Heading("Last runs"),
    ]
    rows = [
        [entry.finished[:16].replace("T", " "), entry.run_id, entry.verdict, entry.reason[:120] or "-"]
        for entry in reversed(entries[-LAST_RUNS:])
    ]
    parts.append(Table(["when (UTC)", "run", "verdict", "why"], rows))
    made_with = [(name, value) for name, value in sorted(last.surroundings.items()) if not name.startswith(SETTING)]
    told = ", ".join(f"{name} {value}" for name, value in made_with)
    parts.append(Text(f"Last run made with: {told}."))
    return parts


def plot_trend(entries: Sequence[Entry], path: Path) -> None:
    """A panel a figure, a line a model in the same colour everywhere, and a bar for every run that was no pass."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(9, 9.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels: list[Any] = list(figure.subplots(len(SHOWN), 1, sharex=True))
    there = {name.split("/")[0] for entry in entries for name in entry.figures}
    owners = [name for name in STYLES if name in there]
    for axes, (name, label, logarithmic) in zip(panels, SHOWN, strict=True):
        for owner in owners:
            key = f"{owner}/{name}"
            points = [(at, entry.figures[key]) for at, entry in enumerate(entries) if key in entry.figures]
            if points:
                shown = [max(value, SMALLEST) if logarithmic else value for _, value in points]
                axes.plot([at for at, _ in points], shown, **STYLES[owner])
        for at, entry in enumerate(entries):
            if not entry.good:
                axes.axvline(at, color=MARKS.get(entry.verdict, "0.5"), alpha=0.35, linewidth=4)
        if logarithmic and axes.lines:
            axes.set_yscale("log")
            # Whole decades, so that a wobble of a few percent does not fill the panel.
            low, high = axes.get_ylim()
            axes.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
        axes.set_ylabel(label, fontsize=8)
        axes.grid(alpha=0.3)
    step = max(1, -(-len(entries) // 12))
    panels[-1].set_xticks(
        list(range(len(entries)))[::step], [entry.finished[:10] for entry in entries][::step], rotation=30, fontsize=7
    )
    lines: list[Any] = [Line2D([], [], label=name.replace("_", " "), **STYLES[name]) for name in owners]
    lines += [
        Line2D([], [], color=MARKS.get(verdict, "0.5"), alpha=0.35, linewidth=4, label=verdict)
        for verdict in sorted({entry.verdict for entry in entries} - {"pass"})
    ]
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines), fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
