"""What a run holds, as one JSON-able record, as text for a terminal and as Markdown.

summary = summarise(Run.open(Path("runs")))
print(render(summary))              # for a terminal
text = as_markdown(summary)         # for the run's page in Prefect
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from flows.session import last_session
from traceforge_core.runs import NOT_OURS, Run
from traceforge_core.stages import STAGES
from traceforge_core.training.job import STRATEGIES

KEY_FIGURES = {
    "ingest": ("found", "read", "quarantined", "by_reason", "duplicates", "by_outcome"),
    "model": ("name", "architecture", "parameters", "vocabulary", "chat_template"),
    "datasets": ("sft_samples", "sft_held_out", "repeated_turns", "pairs", "pairs_held_out", "pairs_by_miner"),
    "noise_floor": ("runs", "steps", "loss_noise", "gradient_direction_noise", "exact"),
    "planted_faults": ("planted", "caught", "missed", "false_alarms"),
    "evaluate": ("pairs", "actions", "accuracy", "action_loss", "note"),
    "compare": ("verdict",),
}
FEW_PAIRS = 20
SIDE_BY_SIDE = 90
TRAINING_FIGURES = ("steps", "first_loss", "last_loss", "tokens", "seconds_per_step", "peak_memory_mib")


def summarise(run: Run) -> dict[str, Any]:
    """run_id, path, stages (stage, status, seconds, figures, path, reused), sft_samples, pairs_by_miner, parity.

    status: completed; outdated (one of its inputs was made anew since); failed, interrupted, running; not_run.
    reused: the last call on this run found the result instead of making it. parity: the comparison's figures (verdict
    and numbers), with status; None where there was none.
    """
    noted = last_session(run).get("stages", {})
    stages = [_stage(run, name, noted.get(name, {})) for name in STAGES]
    by_name = {stage["stage"]: stage for stage in stages}
    datasets, compared = by_name["datasets"]["figures"] or {}, by_name["compare"]
    return {
        "run_id": run.run_id,
        "path": str(run.path),
        "stages": stages,
        "sft_samples": datasets.get("sft_samples"),
        "pairs_by_miner": datasets.get("pairs_by_miner"),
        "parity": dict(compared["figures"]) | {"status": compared["status"]} if compared["figures"] else None,
    }


def _stage(run: Run, name: str, noted: Mapping[str, Any]) -> dict[str, Any]:
    result = run.result(name)
    status = noted.get("status")
    if status == "running" and not run.is_at_work():
        status = "interrupted"
    if status in (None, "completed"):
        if result is not None:
            status = "outdated" if _is_outdated(run, name) else "completed"
        else:
            status = "failed" if run.failure(name) is not None else "not_run"
    record = {
        "stage": name,
        "status": status,
        "seconds": result.seconds if result else None,
        "figures": result.figures if result else None,
        "path": str(result.path) if result else None,
        "reused": bool(noted.get("reused")),
    }
    if status in ("failed", "interrupted") and (message := noted.get("message") or run.failure(name)):
        record["message"] = message
    return record


def _is_outdated(run: Run, name: str) -> bool:
    try:
        manifest = json.loads((run.stage_dir(name) / "manifest.json").read_text(encoding="utf-8"))
        for needed, made_from in manifest["inputs"].items():
            there = run.result(needed) if needed in STAGES else None
            if there is not None and there.key != made_from["key"]:
                return True
    except NOT_OURS:  # nobody can say what it was made from
        return True
    return False


def key_figures(name: str, figures: Mapping[str, Any] | None) -> str:
    """The few figures of a stage that a person wants to see, as one line."""
    figures = figures or {}
    names = KEY_FIGURES.get(name, TRAINING_FIGURES)
    shown = {key: figures[key] for key in names if not _is_empty(figures.get(key))}
    return ", ".join(f"{key.replace('_', ' ')} {_plain(value)}" for key, value in shown.items())


def render(summary: Mapping[str, Any], width: int = 118) -> str:
    """The summary as text: a line or two a stage, then the datasets' sizes and the verdict with its numbers.

    In fewer than 90 columns a stage's figures stand below its name instead of beside it.
    """
    lines = [f"Run {summary['run_id']} in {summary['path']}", ""]
    for stage in summary["stages"]:
        if stage["status"] == "not_run":
            continue
        state = "reused" if stage["reused"] and stage["status"] == "completed" else stage["status"]
        time = "" if stage["seconds"] is None else f"{stage['seconds']:.1f} s"
        head = f"  {stage['stage']:<16} {state:<12} {time:>9}   "
        why = textwrap.shorten(stage.get("message", ""), 160, placeholder=" ...")
        figures = why or key_figures(stage["stage"], stage["figures"])
        margin = " " * (len(head) if width >= SIDE_BY_SIDE else 6)
        beside = textwrap.wrap(figures, width, initial_indent=margin, subsequent_indent=margin) or [margin]
        if width >= SIDE_BY_SIDE:
            lines += [(head + beside[0].removeprefix(margin)).rstrip(), *beside[1:]]
        else:
            lines += [head.rstrip(), *(line for line in beside if line.strip())]
        if stage["path"]:
            lines.append(f"{margin}files: {stage['stage']}/")
    lines.append("")
    by_stage: dict[str, dict[str, Any]] = {stage["stage"]: stage["figures"] or {} for stage in summary["stages"]}
    words = _data_lines(by_stage["datasets"])
    if by_stage["model"].get("name") == "tiny" and by_stage["evaluate"]:
        words.append("The tiny model starts from nothing: its figures show that everything runs, not how good it gets.")
    lines += [line for sentence in words for line in textwrap.wrap(sentence, width)]
    lines += _verdict_lines(summary, width)
    if summary["parity"]:
        lines += [
            "",
            f"Report: {summary['path']}/compare/report.html",
            "Next: traceforge predict; traceforge export --out my-model",
        ]
    return "\n".join(lines)


def as_markdown(summary: Mapping[str, Any]) -> str:
    """The summary as Markdown: a table of the stages, then the verdict with its numbers, and where everything lies."""
    lines = [f"# Run {summary['run_id']}", "", "| stage | state | seconds | figures |", "| --- | --- | --- | --- |"]
    for stage in summary["stages"]:
        if stage["status"] == "not_run":
            continue
        state = "reused" if stage["reused"] and stage["status"] == "completed" else stage["status"]
        time = "" if stage["seconds"] is None else f"{stage['seconds']:.1f}"
        figures = key_figures(stage["stage"], stage["figures"]).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {stage['stage']} | {state} | {time} | {figures} |")
    verdict = [line.strip() for line in _verdict_lines(summary, 10_000)]  # not wrapped
    return "\n".join([*lines, "", *(f"{line}  " for line in verdict), "", f"Files: `{summary['path']}`", ""])


def _data_lines(datasets: Mapping[str, Any]) -> list[str]:
    """Samples and pairs, and what the most were lost to: with thin data that is what a person needs to know."""
    if not datasets:
        return []
    pairs = ", ".join(f"{miner} {count}" for miner, count in (datasets.get("pairs_by_miner") or {}).items())
    lines = [f"SFT samples: {datasets['sft_samples']}. Preference pairs by miner: {pairs or 'none'}."]
    dropped = sorted((datasets.get("dropped") or {}).items(), key=lambda item: -item[1])
    if dropped:
        reasons = ", ".join(f"{reason} {count}" for reason, count in dropped[:3])
        lines.append(f"Most was dropped as: {reasons} (all reasons: traceforge data).")
    held_out = datasets.get("pairs_held_out") or 0
    if pairs and not held_out:
        lines.append("No held-out pair: nothing says how the model ranks pairs that it has not seen.")
    elif 0 < held_out < FEW_PAIRS:
        lines.append(
            f"Only {held_out} held-out pair{'s' * (held_out > 1)}: too few for accuracy or margin to mean much."
        )
    return lines


def _verdict_lines(summary: Mapping[str, Any], width: int) -> list[str]:
    parity = summary["parity"]
    if not parity:
        return []
    old = " (outdated: a stage was run again since; run compare)" if parity["status"] == "outdated" else ""
    lines = [f"Parity with the oracle: {str(parity['verdict']).upper()}{old}"]
    for name, numbers in parity.items():
        if isinstance(numbers, dict) and "verdict" in numbers:
            rest = {key: value for key, value in numbers.items() if key != "verdict" and _is_shown(value)}
            told = ", ".join(f"{key.replace('_', ' ')} {_plain(value)}" for key, value in rest.items())
            lines += textwrap.wrap(
                f"{name}: {numbers['verdict']}; {told}", width, initial_indent="  ", subsequent_indent="    "
            )
    return lines


def why_not(parity: Mapping[str, Any]) -> str:
    """For a verdict that is no pass: in a sentence, which strategy left its limits in what, or what else is wrong."""
    told, wrong = [], []
    for name in STRATEGIES:
        numbers = parity.get(name) or {"verdict": "pass"}
        if numbers["verdict"] == "fail":
            wrong.append(name)
            first = numbers["first_wrong"]
            told.append(f"{name} does not agree with the oracle" + (f" ({first})" if first else ""))
        elif numbers["verdict"] != "pass":
            told.append(f"whether {name} agrees with the oracle is {numbers['verdict']}")
    planted = parity.get("planted_faults") or {}
    if planted.get("missed"):
        told.append(f"the comparison no longer finds known faults ({', '.join(planted['missed'])})")
    # What is wrong with a strategy itself is so where no fault was planted, too.
    if alarms := [one for one in planted.get("false_alarms") or [] if one.partition(":")[0] not in wrong]:
        told.append(f"the comparison calls runs wrong in which no fault was planted ({', '.join(alarms)})")
    return ("; ".join(told)) or "a strategy does not agree with the oracle"


def _is_empty(value: Any) -> bool:
    """Also a figure that no model has."""
    return all(inner is None for inner in value.values()) if isinstance(value, Mapping) else value in (None, [])


def _is_shown(value: Any) -> bool:
    return value not in (None, []) and not isinstance(value, dict)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items()) + ")"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
