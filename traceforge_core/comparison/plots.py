"""The three plots of a comparison: losses, margins, and the differences from the oracle against the noise band."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from traceforge_core.comparison.deviations import Deviations
from traceforge_core.comparison.noise import noise_band
from traceforge_core.comparison.parity import Parity
from traceforge_core.training.records import StepRecord

SMALLEST = 1e-16  # where every difference is exactly 0: float64's own resolution of 1
Curves = dict[str, list[StepRecord]]


def plot_losses(oracle: list[StepRecord], strategies: Curves, path: Path) -> None:
    """Every strategy's loss over the oracle's."""
    _plot_curves(oracle, strategies, path, "SimPO loss", lambda record: record.loss)


def plot_margins(oracle: list[StepRecord], strategies: Curves, path: Path) -> None:
    """β·(score_chosen - score_rejected) of every strategy over the oracle's."""
    _plot_curves(oracle, strategies, path, "margin β·(ā chosen - ā rejected)", lambda record: record.margin or 0.0)


def plot_differences(strategies: dict[str, Parity], floor: Sequence[Deviations], path: Path) -> None:
    """|difference from the oracle| of the loss and of the gradient's length, with the oracle's own noise as a band. A
    difference of exactly 0 has no logarithm: it is drawn a little below the smallest one that is none."""
    figure, (above, below) = _axes(2, (8, 6))
    for axes, name, noise, label in (
        (above, "loss", "loss", "|loss - oracle's|"),
        (below, "norm", "norm", "gradient norm, relative"),
    ):
        drawn = [getattr(step, name) for parity in strategies.values() for step in parity.steps]
        drawn += [abs(value) for run in floor for value in getattr(run, noise)]
        lowest = min((value for value in drawn if value > 0), default=3 * SMALLEST) / 3
        if floor:
            band = noise_band(floor, noise)
            steps = range(1, len(band) + 1)
            axes.fill_between(steps, [b / 30 for b in band], band, color="0.75", label="oracle against itself (RMS)")
            for run in floor:
                axes.plot(steps, [max(abs(v), lowest) for v in getattr(run, noise)[: len(band)]], ".", color="0.55")
        for strategy, parity in strategies.items():
            differences = [max(getattr(step, name), lowest) for step in parity.steps]
            axes.plot([step.step for step in parity.steps], differences, marker="o", markersize=4, label=strategy)
        axes.set_yscale("log")
        axes.set_ylabel(label)
        axes.legend(fontsize=8)
    _save(figure, below, path)


def _plot_curves(
    oracle: list[StepRecord], strategies: Curves, path: Path, label: str, value: Callable[[StepRecord], float]
) -> None:
    figure, (axes,) = _axes(1, (8, 4))
    axes.plot(
        [record.step for record in oracle],
        [value(record) for record in oracle],
        color="black",
        linewidth=3,
        alpha=0.4,
        label="oracle",
    )
    for name, records in strategies.items():
        axes.plot([r.step for r in records], [value(r) for r in records], linestyle="--", marker=".", label=name)
    axes.set_ylabel(label)
    axes.legend()
    _save(figure, axes, path)


def _axes(rows: int, size: tuple[float, float]) -> tuple[Any, Sequence[Any]]:
    """A figure that needs no display, and its axes from top to bottom."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    for each in axes:
        each.grid(alpha=0.3)
    return figure, list(axes)


def _save(figure: Any, lowest: Any, path: Path) -> None:
    lowest.set_xlabel("optimizer step")
    lowest.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=110)
