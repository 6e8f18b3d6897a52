"""The evaluation as Markdown and as a plot that shows in one look whether training did what it should."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

TITLES = {
    "base": "base",
    "sft": "SFT",
    "oracle": "oracle (TRL)",
    "branch_parallel": "Branch-Parallel",
    "shared_prefix": "shared prefix",
}
COLOURS = ("#8c8c8c", "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
Table = list[list[str]]


def render(result: Mapping[str, Any]) -> str:
    """`evaluation.json` as Markdown: a table of pairs, one of next actions, the plot, and how to read them."""
    models, held_out = result["models"], result["held_out"]
    pairs = {name: answer["pairs"] for name, answer in models.items() if answer["pairs"]}
    actions = {name: answer["actions"] for name, answer in models.items() if answer["actions"]}
    parts = ["# Evaluation on held-out data"]
    if pairs:
        used = next(iter(pairs.values()))["pairs"]
        header = ["model", "accuracy", "margin", "ā chosen", "ā rejected", "SimPO loss", "length correlation"]
        keys: tuple[str, ...] = ("accuracy", "margin", "score_chosen", "score_rejected", "loss", "length_correlation")
        body = [[title(name), *(_number(figures[key], key) for key in keys)] for name, figures in pairs.items()]
        parts += [f"## Pairs ({used} of {held_out['pairs']})", _table(header, body)]
        parts.append(
            f"Accuracy: share of pairs whose chosen completion scores higher. Margin: {result['beta']:g} × mean score "
            "difference. Scores ā: mean log-probability a token. Length correlation: of the score difference with the "
            "difference in tokens; far from 0, length is what the score follows."
        )
    else:
        parts.append("No pairs are held out.")
    if actions:
        used = next(iter(actions.values()))["actions"]
        header = ["model", "loss", "token accuracy", "whole action right", "tokens"]
        keys = ("loss", "token_accuracy", "exact", "tokens")
        body = [[title(name), *(_number(figures[key], key) for key in keys)] for name, figures in actions.items()]
        parts += [f"## Next actions ({used} of {held_out['actions']})", _table(header, body)]
        parts.append("Loss: mean -log p a token. Token accuracy: share of tokens that are the model's first choice.")
    else:
        parts.append("No next actions are held out.")
    parts.append("![Held-out pairs and next actions of every model](evaluation.png)")
    return "\n\n".join(parts) + "\n"


def title(name: str) -> str:
    """A model's name as people read it."""
    return TITLES.get(name, name)


def draw(measured: Mapping[str, Any], path: Path) -> None:
    """Pair accuracy, score differences, next-action figures and score against length, a colour a model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with_pairs = any(answer["pairs"] for answer in measured.values())
    with_actions = any(answer["actions"] for answer in measured.values())
    rows = 1 + (with_pairs and with_actions)
    panels = 4 * with_pairs + 2 * with_actions
    figure = Figure(figsize=(3.6 * panels / rows, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, panels // rows, squeeze=False).flat)
    if with_pairs:
        _bars(axes.pop(0), measured, "pairs", "accuracy", "pairs ranked right", share=True, chance=0.5)
        _strips(axes.pop(0), measured)
        _against_length(axes.pop(0), measured)
        _bars(axes.pop(0), measured, "pairs", "loss", "pairs: SimPO loss")
    if with_actions:
        _bars(axes.pop(0), measured, "actions", "loss", "next action: loss (nats a token)")
        _bars(axes.pop(0), measured, "actions", "token_accuracy", "next action: tokens right", share=True)
    figure.savefig(path, dpi=130)


def _colours(measured: Mapping[str, Any]) -> dict[str, str]:
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(measured)}


def _bars(
    axis: Any,
    measured: Mapping[str, Any],
    kind: str,
    key: str,
    label: str,
    share: bool = False,
    chance: float | None = None,
) -> None:
    names = list(measured)
    values = [measured[name][kind][key] for name in names]
    bars = axis.bar(range(len(names)), values, color=list(_colours(measured).values()), width=0.72)
    axis.bar_label(bars, [f"{value:.0%}" if share else f"{value:.3g}" for value in values], fontsize=8, padding=2)
    if chance is not None:
        axis.axhline(chance, color="black", linewidth=0.8, linestyle=":")
    axis.set_ylim(0, 1.08 if share and max(values) > 0.5 else 1.18 * max(values) or 1)
    _finish(axis, names, label)


def _strips(axis: Any, measured: Mapping[str, Any]) -> None:
    """Each pair a point, the median a bar."""
    names = list(measured)
    for place, (name, colour) in enumerate(_colours(measured).items()):
        values = sorted(row["chosen"] - row["rejected"] for row in measured[name]["rows"]["pairs"])
        shifts = [place + 0.42 * (((index * 0.618034) % 1) - 0.5) for index in range(len(values))]
        axis.plot(shifts, values, ".", color=colour, markersize=4, alpha=0.7)
        middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
        axis.plot([place - 0.32, place + 0.32], [middle, middle], color="black", linewidth=1.6)
    axis.axhline(0, color="black", linewidth=0.8, linestyle=":")
    _finish(axis, names, "score difference of each pair (nats a token)")


def _against_length(axis: Any, measured: Mapping[str, Any]) -> None:
    for name, colour in _colours(measured).items():
        scores = measured[name]["rows"]["pairs"]
        lengths = [row["chosen_tokens"] - row["rejected_tokens"] for row in scores]
        r = measured[name]["pairs"]["length_correlation"]
        told = title(name) if r is None else f"{title(name)}, r = {r:+.2f}"
        axis.plot(
            lengths, [row["chosen"] - row["rejected"] for row in scores], ".", color=colour, alpha=0.7, label=told
        )
    axis.axhline(0, color="black", linewidth=0.8, linestyle=":")
    axis.axvline(0, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlabel("chosen longer by (tokens)", fontsize=8)
    axis.set_title("score difference against length", fontsize=9)
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=6.5)


def _finish(axis: Any, names: list[str], label: str) -> None:
    axis.set_xticks(range(len(names)), [title(name) for name in names], rotation=25, ha="right", fontsize=8)
    axis.set_title(label, fontsize=9)
    axis.tick_params(axis="y", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


def _table(header: list[str], body: Table) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _number(value: Any, key: str) -> str:
    if value is None:
        return "-"
    if key in ("accuracy", "token_accuracy", "exact"):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
