"""Loss curves of the strategies over each other, and each one's difference from the oracle, as one PNG."""

from __future__ import annotations

from pathlib import Path

from traceforge_core.comparison.report import Compared


def plot_losses(oracle: Compared, compared: list[Compared], path: Path) -> None:
    """Draw the losses above and |loss - oracle's| (logarithmic) below. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps = [record.step for record in oracle.steps]
    above.plot(steps, [record.loss for record in oracle.steps], color="black", linewidth=3, alpha=0.4, label="oracle")
    for one in compared:
        assert one.parity is not None
        above.plot(steps, [record.loss for record in one.steps], linestyle="--", marker=".", label=one.name)
        # A difference of exactly 0 has no logarithm: drawn at float64's own resolution of 1.
        differences = [max(step.loss, 1e-16) for step in one.parity.steps]
        below.plot(steps, differences, marker=".", label=one.name)
    above.set_ylabel("SimPO loss")
    above.legend()
    below.set_yscale("log")
    below.set_ylabel("|loss - oracle's|")
    below.set_xlabel("optimizer step")
    below.xaxis.get_major_locator().set_params(integer=True)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
