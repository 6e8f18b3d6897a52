"""How a training went, as one picture: loss, margin where there are pairs, gradient length and memory, step by step.

png = plot_training(read_records(stage_dir / "metrics.jsonl"))
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

from traceforge_core.training.records import StepRecord

CURVES: tuple[tuple[str, Callable[[StepRecord], float | None]], ...] = (
    ("loss", lambda record: record.loss),
    ("margin β·(ā chosen - ā rejected)", lambda record: record.margin),
    ("gradient norm", lambda record: record.grad_norm),
    ("peak memory (MiB)", lambda record: record.peak_memory_mib),
)


def plot_training(records: Sequence[StepRecord]) -> bytes:
    """A PNG with a panel for every curve that the records have. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = []
    for label, value in CURVES:
        points = [(record.step, number) for record in records if (number := value(record)) is not None]
        if points:
            curves.append((label, points))
    figure = Figure(figsize=(8, 1.9 * len(curves)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (label, points) in zip(panels, curves, strict=True):
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 100 else "")
        axes.set_ylabel(label, fontsize=8)
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("optimizer step")
    panels[-1].xaxis.get_major_locator().set_params(integer=True)
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=110)
    return written.getvalue()
