"""The table and the plot of real_weights.py, from the run folders that it leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traceforge_core.comparison.parity import read_steps, read_training
from traceforge_core.runs import read_figures, write_json

MODELS = {"base": "before", "oracle": "oracle (TRL)", "branch_parallel": "Branch-Parallel"}
COLOURS = {"base": "#8c8c8c", "oracle": "#ee6677", "branch_parallel": "#4477aa"}
KEYS = ("accuracy", "margin", "loss", "score_chosen", "score_rejected")
SIDES = {"train": "pairs trained on", "held_out": "held-out cases"}
Table = list[list[str]]


def write_report(runs: Mapping[str, Path], folder: Path) -> str:
    """Write real-weights.json and real-weights.png into `folder` (its images/ and figures/ where it has them); the
    table as Markdown. `runs` are run folders by dtype, the first of which is drawn."""
    results = {dtype: _read(run) for dtype, run in runs.items()}
    images, figures = ((folder / name if (folder / name).is_dir() else folder) for name in ("images", "figures"))
    write_json(figures / "real-weights.json", results)
    _draw(results, images / "real-weights.png")
    return _markdown(results)


def _read(run: Path) -> dict[str, Any]:
    evaluations = {"train": run / "trained_pairs", "held_out": run / "evaluate"}
    pairs = {}
    for side, stage in evaluations.items():
        models = json.loads((stage / "evaluation.json").read_text(encoding="utf-8"))["models"]
        pairs[side] = {name: answer["pairs"] for name, answer in models.items() if answer["pairs"]}
    strategies = {}
    for name in ("oracle", "branch_parallel"):
        stage = run / name
        training, figures, steps = read_training(stage), read_figures(stage), read_steps(stage)
        strategies[name] = {
            "device": training["device_name"],
            "workers": training["workers"],
            "transport": training["transport"],
            "versions": training["versions"],
            "seconds_per_step": figures["seconds_per_step"],
            "losses": [step.loss for step in steps],
            "accuracies": [step.accuracy for step in steps],
            "grad_norms": [step.grad_norm for step in steps],
        }
    datasets = read_figures(run / "datasets")
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    return {
        "model": json.loads((run / "model" / "model.json").read_text(encoding="utf-8"))["architecture"],
        "lora": config["model"]["lora"],
        "preference": config["preference"],
        "split": config["datasets"]["split"],
        "datasets": {name: datasets[name] for name in ("pairs", "pairs_held_out", "pairs_by_miner", "pair_tokens")},
        "cases": {side: _cases(run, side) for side in SIDES},
        "pairs": pairs,
        "strategies": strategies,
        "compare": read_figures(run / "compare"),
    }


def _cases(run: Path, side: str) -> dict[str, int]:
    import pyarrow.parquet as pq

    found = pq.read_table(run / "datasets" / "preference" / f"{side}.parquet", columns=["case"]).column("case")
    return {entry["values"]: entry["counts"] for entry in found.value_counts().to_pylist()}


def _markdown(results: Mapping[str, Any]) -> str:
    body: Table = []
    for dtype, result in results.items():
        for side, told in SIDES.items():
            for name, answer in result["pairs"][side].items():
                cells = [f"{answer['accuracy']:.1%}", *(f"{answer[key]:+.3f}" for key in ("margin",))]
                cells += [f"{answer[key]:.3f}" for key in ("loss", "score_chosen", "score_rejected")]
                body.append([dtype, f"{told} ({answer['pairs']})", MODELS[name], *cells])
    header = ["dtype", "pairs", "model", "accuracy", "margin β·Δā", "SimPO loss", "ā chosen", "ā rejected"]
    parts = [_table(header, body)]
    body = []
    for dtype, result in results.items():
        verdict = result["compare"]["branch_parallel"]
        oracle, own = (result["strategies"][name] for name in ("oracle", "branch_parallel"))
        gradient = verdict["max_gradient_difference"]
        body.append(
            [
                dtype,
                str(len(oracle["losses"])),
                verdict["verdict"],
                f"{verdict['max_loss_difference']:.2g}",
                "-" if gradient is None else f"{gradient:.2g}",
                f"{verdict['adapter_difference']:.2g}",
                f"{oracle['seconds_per_step']:.3g} s, {own['seconds_per_step']:.3g} s",
                f"{own['device']}, {own['transport']}",
            ]
        )
    header = ["dtype", "steps", "verdict", "loss, largest Δ", "gradient, rel. L2", "final adapter, rel. L2"]
    return "\n\n".join([*parts, _table([*header, "a step: oracle, Branch-Parallel", "ran on"], body)])


def _draw(results: Mapping[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    result = next(iter(results.values()))
    figure = Figure(figsize=(11, 6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, width_ratios=(2, 1, 1))
    losses, differences = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0])
    _draw_losses(losses, result)
    for dtype, answer in results.items():
        ours, theirs = (answer["strategies"][name]["losses"] for name in ("branch_parallel", "oracle"))
        apart = [abs(own - reference) for own, reference in zip(ours, theirs, strict=True)]
        # A difference of exactly 0 has no logarithm: drawn a little below the smallest one that is none.
        lowest = min((value for value in apart if value > 0), default=1e-16) / 3
        shown = [max(value, lowest) for value in apart]
        differences.plot(range(1, len(shown) + 1), shown, ".-", linewidth=1, label=dtype)
    differences.set_yscale("log")
    differences.set_title("Branch-Parallel's loss against the oracle's, |difference|", fontsize=9)
    differences.set_xlabel("optimizer step", fontsize=8)
    differences.legend(fontsize=8)
    for row, side in enumerate(SIDES):
        models = result["pairs"][side]
        count = next(iter(models.values()))["pairs"]
        for column, (key, told) in enumerate({"accuracy": "accuracy", "margin": "margin β·Δā"}.items(), 1):
            axis = figure.add_subplot(grid[row, column])
            values = [models[name][key] for name in models]
            bars = axis.bar([MODELS[name] for name in models], values, color=[COLOURS[name] for name in models])
            axis.bar_label(bars, [f"{v:.0%}" if key == "accuracy" else f"{v:+.2f}" for v in values], fontsize=8)
            axis.margins(y=0.15)
            if key == "accuracy":
                axis.axhline(0.5, color="black", linewidth=0.8, linestyle=":")
                axis.set_ylim(0, 1.1)
            else:
                axis.axhline(0, color="black", linewidth=0.8)
            axis.set_title(f"{told}, {SIDES[side]} ({count})", fontsize=9)
            axis.tick_params(axis="x", labelsize=7, rotation=15)
    for axis in figure.axes:
        axis.tick_params(axis="y", labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _draw_losses(axis: Any, result: Mapping[str, Any]) -> None:
    """Each step's loss, and its mean over about a pass of the data: a step sees only a pair or two."""
    window = max(1, result["datasets"]["pairs"] // result["preference"]["gradient_accumulation"])
    for name, style in {"oracle": {"linewidth": 4, "alpha": 0.45}, "branch_parallel": {"linewidth": 1.2}}.items():
        losses = result["strategies"][name]["losses"]
        steps = range(1, len(losses) + 1)
        axis.plot(steps, losses, ".", color=COLOURS[name], markersize=7 if name == "oracle" else 3, alpha=0.5)
        means = [sum(losses[max(0, i - window) : i]) / min(i, window) for i in steps]
        axis.plot(steps, means, color=COLOURS[name], label=f"{MODELS[name]}, mean of {window} steps", **style)
    pairs = result["preference"]["gradient_accumulation"]
    axis.set_title(f"SimPO loss (pairs a step: {pairs})", fontsize=9)
    axis.legend(fontsize=8)


def _table(header: list[str], body: Table) -> str:
    lines = [header, ["---"] * 3 + ["---:"] * (len(header) - 3), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
