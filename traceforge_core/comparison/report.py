"""The comparison's report, for people (Markdown) and for programs (JSON)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from traceforge_core.comparison.parity import Parity, Verdict
from traceforge_core.runs import write_json
from traceforge_core.training.records import StepRecord


@dataclass(frozen=True, slots=True)
class Compared:
    """One strategy: its differences from the oracle and the verdict (None for the oracle itself), what it noted about
    its training, and its step log."""

    name: str
    parity: Parity | None
    verdict: Verdict | None
    training: dict[str, Any]
    steps: list[StepRecord]


def write_report(overall: str, oracle: Compared, compared: list[Compared], out_dir: Path) -> None:
    """Write report.json and report.md."""
    write_json(
        out_dir / "report.json",
        {
            "verdict": overall,
            "oracle": {"training": oracle.training, "steps": [asdict(step) for step in oracle.steps]},
            "strategies": {
                one.name: {
                    "verdict": asdict(one.verdict) if one.verdict else None,
                    "parity": one.parity.as_dict() if one.parity else None,
                    "training": one.training,
                    "steps": [asdict(step) for step in one.steps],
                }
                for one in compared
            },
        },
    )
    (out_dir / "report.md").write_text(render_markdown(overall, oracle, compared), encoding="utf-8")


def render_markdown(overall: str, oracle: Compared, compared: list[Compared]) -> str:
    """The report as Markdown; it refers to loss.png beside it."""
    lines = ["# Comparison with the oracle (TRL's CPOTrainer)", "", f"**Verdict: {overall}**", ""]
    for one in compared:
        if one.verdict is None:
            continue
        lines += [f"## {one.name}: {one.verdict.outcome}", ""]
        lines += [f"- {reason}" for reason in one.verdict.reasons]
        lines += [""]
    lines += ["![Loss of each strategy, and its difference from the oracle](loss.png)", ""]
    lines += _ran_on([oracle, *compared])
    for one in compared:
        if one.parity is not None:
            lines += _step_table(one, oracle)
    return "\n".join(lines) + "\n"


def _ran_on(all_of_them: list[Compared]) -> list[str]:
    lines = [
        "## What ran",
        "",
        "| strategy | workers | device | backend | dtype | transport | s/step | exchange s | peak MiB | last loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in all_of_them:
        training, steps = one.training, one.steps
        seconds = sum(step.seconds or 0.0 for step in steps) / max(1, len(steps))
        exchange = sum(step.exchange_seconds for step in steps) / max(1, len(steps))
        peak = max((step.peak_memory_mib or 0.0 for step in steps), default=0.0)
        dtype = training["dtype"] + (f" ({training['quantization']})" if training["quantization"] != "none" else "")
        last = f"{steps[-1].loss:.6g}" if steps else "-"
        lines.append(
            f"| {one.name} | {training['workers']} | {training['device_name']} | {training['backend']} | {dtype} | "
            f"{training['transport'] or '-'} | {seconds:.4g} | {exchange:.3g} | {peak:.0f} | {last} |"
        )
    return [*lines, ""]


def _step_table(one: Compared, oracle: Compared) -> list[str]:
    assert one.parity is not None
    lines = [
        f"## {one.name}, step by step",
        "",
        "Losses are the oracle's; the rest are differences from the oracle (gradients: relative L2 of the parameter "
        "that differs most).",
        "",
        "| step | loss | Δ loss | Δ chosen score | Δ rejected score | Δ gradient norm | Δ gradient | of |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for step, reference in zip(one.parity.steps, oracle.steps, strict=True):
        gradient = f"{step.gradient:.3g}" if step.gradient is not None else "-"
        lines.append(
            f"| {step.step} | {reference.loss:.6g} | {step.loss:.3g} | {step.score_chosen:.3g} | "
            f"{step.score_rejected:.3g} | {step.grad_norm:.3g} | {gradient} | {step.gradient_parameter or '-'} |"
        )
    return [
        *lines,
        "",
        f"Final adapter: {one.parity.adapter:.3g} over all weights; most in {one.parity.adapter_parameter} "
        f"({one.parity.adapter_worst:.3g}).",
        "",
    ]
