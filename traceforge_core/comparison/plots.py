"""The three plots of a comparison: losses, margins, and the differences from the oracle, with what they may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from traceforge_core.comparison.deviations import Deviations
from traceforge_core.comparison.parity import Parity
from traceforge_core.training.records import StepRecord

SMALLEST = 1e-16  # where every difference is exactly 0: float64's own resolution of 1
# Lines that should lie on each other are drawn so that each is seen: the oracle's broad and below, the others over it.
STYLES: dict[str, dict[str, Any]] = {
    "base": {"color": "0.6", "marker": ".", "linestyle": ":"},
    "sft": {"color": "#2da44e", "marker": "."},
    "oracle": {"color": "black", "alpha": 0.3, "linewidth": 5, "marker": "s", "markersize": 5},
    "branch_parallel": {"color": "#0969da", "marker": "o", "markersize": 7, "fillstyle": "none"},
    "shared_prefix": {"color": "#d4762c", "marker": "x", "linestyle": "--"},
}
Curves = dict[str, list[StepRecord]]


def plot_losses(oracle: list[StepRecord], strategies: Curves, path: Path) -> None:
    """Every strategy's loss over the oracle's."""
    _plot_curves(oracle, strategies, path, "SimPO loss", lambda record: record.loss)


def plot_margins(oracle: list[StepRecord], strategies: Curves, path: Path) -> None:
    """β·(score_chosen - score_rejected) of every strategy over the oracle's."""
    _plot_curves(oracle, strategies, path, "margin β·(ā chosen - ā rejected)", lambda record: record.margin or 0.0)


def plot_differences(
    strategies: Mapping[str, Parity],
    floor: Sequence[Deviations],
    allowed: Mapping[str, Sequence[float]],
    path: Path,
) -> None:
    """|difference from the oracle| of the loss and of the gradient's length, over what each may be at a step
    (`allowed`: "loss" and "norm"; {} where nothing decides) and the oracle's own runs. A difference of exactly 0 has no
    logarithm: it is drawn a little below the smallest one that is none."""
    figure, (above, below) = _axes(2, (8, 6.5))
    for axes, name, label in ((above, "loss", "|loss - oracle's|"), (below, "norm", "gradient's length, relative")):
        drawn = [getattr(step, name) for parity in strategies.values() for step in parity.steps]
        drawn += [abs(value) for run in floor for value in getattr(run, name)]
        lowest = min((value for value in drawn if value > 0), default=3 * SMALLEST) / 3
        if limits := allowed.get(name):
            steps = range(1, len(limits) + 1)
            axes.fill_between(
                steps, [lowest / 3] * len(limits), limits, color="#2da44e", alpha=0.12, label="may be so much"
            )
            axes.plot(steps, limits, color="#2da44e", linewidth=1)
        for number, run in enumerate(floor):
            values = [max(abs(value), lowest) for value in getattr(run, name)]
            label_once = {"label": "oracle against itself"} if number == 0 else {}
            axes.plot(range(1, len(values) + 1), values, ".", color="0.45", **label_once)
        for strategy, parity in strategies.items():
            differences = [max(getattr(step, name), lowest) for step in parity.steps]
            axes.plot([step.step for step in parity.steps], differences, label=_plain(strategy), **STYLES[strategy])
        axes.set_yscale("log")
        axes.set_ylim(bottom=lowest / 3)
        axes.set_ylabel(label)
    _save(figure, below, path)


def _plot_curves(
    oracle: list[StepRecord], strategies: Curves, path: Path, label: str, value: Callable[[StepRecord], float]
) -> None:
    figure, (axes,) = _axes(1, (8, 4))
    for name, records in {"oracle": oracle, **strategies}.items():
        axes.plot([r.step for r in records], [value(r) for r in records], label=_plain(name), **STYLES[name])
    axes.set_ylabel(label)
    _save(figure, axes, path)


def _plain(name: str) -> str:
    return name.replace("_", " ")


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
    handles, labels = lowest.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=9, frameon=False)
    figure.savefig(path, dpi=110)
