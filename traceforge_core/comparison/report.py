"""The comparison's report: verdict, three plots, where each quantity lies, held-out figures, versions, links.

Written three ways from the same parts: report.md (Prefect shows it), report.html (one file for everyone else) and
report.json (for programs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from traceforge_core.comparison.document import Bullets, Heading, Part, Picture, Table, Text, html, markdown
from traceforge_core.comparison.held_out import held_out_parts
from traceforge_core.comparison.parity import Parity
from traceforge_core.comparison.verdict import Verdict
from traceforge_core.runs import write_json
from traceforge_core.training.records import StepRecord

MOST_STEPS = 40
TESTS = (
    "A test is the difference in units of its float32 limit, or of 1.5 times the oracle's own noise; of a distance "
    "(gradient direction, adapter), how many spreads of the noise it lies above that: negative where it is closer."
)


@dataclass(frozen=True, slots=True)
class Trained:
    """A strategy as it was trained: what it noted about its start and surroundings, its step log, its folder's name."""

    name: str
    training: dict[str, Any]
    steps: list[StepRecord]


@dataclass(frozen=True, slots=True)
class Compared(Trained):
    """A strategy, its differences from the oracle, and what follows from them. exact: verdict of the float32 comparison
    beside a bfloat16 one, as a dict; None where there was none."""

    parity: Parity
    verdict: Verdict
    exact: dict[str, Any] | None = None


def write_report(
    overall: str,
    oracle: Trained,
    compared: Sequence[Compared],
    evaluation: Mapping[str, Any] | None,
    planted: Mapping[str, Any] | None,
    out_dir: Path,
) -> None:
    """Write report.json, report.md and report.html. The plots must be there already. `evaluation`: evaluation.json;
    `planted`: figures of the stage planted_faults. None where there was no such stage."""
    write_json(
        out_dir / "report.json",
        {
            "verdict": overall,
            "oracle": {"training": oracle.training, "steps": _without_sketches(oracle.steps)},
            "strategies": {
                one.name: {
                    "verdict": asdict(one.verdict),
                    "exact": one.exact,
                    "parity": one.parity.as_dict(),
                    "training": one.training,
                    "steps": _without_sketches(one.steps),
                }
                for one in compared
            },
            "evaluation": (evaluation or {}).get("models"),
            "planted_faults": planted,
        },
    )
    parts = report_parts(overall, oracle, compared, evaluation, planted)
    (out_dir / "report.md").write_text(markdown(parts), encoding="utf-8")
    (out_dir / "report.html").write_text(html(parts, out_dir, "TraceForge: comparison"), encoding="utf-8")


def report_parts(
    overall: str,
    oracle: Trained,
    compared: Sequence[Compared],
    evaluation: Mapping[str, Any] | None,
    planted: Mapping[str, Any] | None,
) -> list[Part]:
    """The report, most important first."""
    parts: list[Part] = [
        Heading("Comparison with the oracle (TRL's CPOTrainer)", 1),
        Text(f"Verdict: **{overall}**"),
        Bullets([*(_in_short(one) for one in compared), *([] if planted is None else [planted_in_short(planted)])]),
        Picture("loss.png", "Loss of each strategy"),
        Picture("margin.png", "Margin of each strategy"),
        Picture("difference.png", "Differences from the oracle, with the oracle's own noise where it was measured"),
    ]
    for one in compared:
        parts += _verdict_parts(one)
    agreeing = [one.name for one in compared if one.verdict.outcome == "pass"]
    parts += held_out_parts(evaluation, oracle.training, agreeing)
    parts += [Heading("What ran"), _ran_on([oracle, *compared]), *_versions([oracle, *compared])]
    if any(one.training.get("trust_remote_code") for one in (oracle, *compared)):
        parts.append(Text("Python code that comes with the model was allowed to run (`model.trust_remote_code`)."))
    parts.append(
        Text(
            "Files of this run: "
            + ", ".join(
                f"[{one.name}](../{one.name}/) ([steps](../{where}/metrics.jsonl), [logs](../{where}/logs/))"
                for one, where in _where([oracle, *compared])
            )
            + ", [numbers of this report](report.json)"
        )
    )
    for one in compared:
        parts += _step_parts(one, oracle)
    return parts


def _in_short(one: Compared) -> str:
    """The verdict and what is wrong first; by the float32 comparison where that found it, since no rounding hides it
    there."""
    own = f"**{one.verdict.outcome}**. {_sentence(one.verdict.reasons[0])}{_how_close(one)}"
    if one.exact is None:
        return f"{one.name}: {own}"
    exact = f"**{one.exact['outcome']}**."
    if one.exact["outcome"] != "fail":
        return f"{one.name}: {own} In float32, on short pairs: {exact}"
    exact += f" {_sentence(one.exact['reasons'][0])}"
    return f"{one.name}: in float32, on short pairs: {exact} In the run's own precision: {own}"


def _how_close(one: Compared) -> str:
    """The largest differences, where nothing is wrong."""
    if one.verdict.outcome == "fail":
        return ""
    parity = one.parity
    cut_to = one.training.get("cut_to")
    cut = f" on pairs cut to {cut_to} tokens" if cut_to is not None else ""
    gradient = "" if parity.max_gradient is None else f", gradients {parity.max_gradient:.2g}"
    return (
        f" Largest differences in {len(parity.steps)} steps{cut}: loss {parity.max_loss:.2g}{gradient}, final adapter "
        f"{parity.adapter:.2g} (relative)."
    )


def _where(all_of_them: Sequence[Trained]) -> list[tuple[Trained, str]]:
    """Each, with the folder of the run that was compared: beside its whole training where pairs were cut for it."""
    oracle = all_of_them[0]
    cut = [one is not oracle and one.training.get("cut_to") is not None for one in all_of_them]
    return [(one, f"{one.name}/proof" if its else one.name) for one, its in zip(all_of_them, cut, strict=True)]


def _sentence(reason: str) -> str:
    return f"{reason[0].upper()}{reason[1:].rstrip('.')}."


def planted_in_short(planted: Mapping[str, Any]) -> str:
    """What came of the planted faults, in a sentence or two."""
    told, caught, count = (planted[name] for name in ("verdict", "caught", "planted"))
    said = f"Known faults: **{told}**. {caught} of {count} were found when planted."
    if planted["missed"]:
        said += f" Missed, so that nothing said here can be relied on: {', '.join(planted['missed'])}."
    if planted["false_alarms"]:
        said += f" Called wrong though none was planted: {', '.join(planted['false_alarms'])}."
    if planted["pointed_elsewhere"]:
        said += f" Found, but pointed at as something else: {', '.join(planted['pointed_elsewhere'])}."
    return said


def _verdict_parts(one: Compared) -> list[Part]:
    parts: list[Part] = [Heading(f"{one.name}: {one.verdict.outcome}"), Bullets(one.verdict.reasons)]
    if one.verdict.places:
        rows = [
            [
                place.name,
                f"{place.difference:.3g}",
                f"{place.scale:.3g}",
                f"{place.statistic:.3g}",
                f"{place.limit:.3g}",
                str(place.step),
                "-" if place.left_at is None else f"step {place.left_at}",
            ]
            for place in one.verdict.places
        ]
        header = ["quantity", "difference", "noise or limit", "test", "may be", "at step", "leaves at"]
        parts += [Table(header, rows), Text(TESTS)]
    if one.exact is not None:
        parts.append(Text(f"In float32, on pairs cut short: **{one.exact['outcome']}**"))
        parts.append(Bullets(one.exact["reasons"]))
    return parts


def _ran_on(all_of_them: Sequence[Trained]) -> Table:
    rows = []
    for one in all_of_them:
        training, steps = one.training, one.steps
        seconds = sum(step.seconds or 0.0 for step in steps) / max(1, len(steps))
        exchange = sum(step.exchange_seconds for step in steps) / max(1, len(steps))
        peak = max((step.peak_memory_mib or 0.0 for step in steps), default=0.0)
        dtype = training["dtype"] + (f" ({training['quantization']})" if training["quantization"] != "none" else "")
        last = f"{steps[-1].loss:.6g}" if steps else "-"
        rows.append(
            [
                one.name,
                str(training["workers"]),
                training["device_name"],
                training["backend"],
                dtype,
                training["transport"] or "-",
                f"{seconds:.4g}",
                f"{exchange:.3g}",
                f"{peak:.0f}",
                last,
            ]
        )
    header = ["strategy", "workers", "device", "backend", "dtype", "transport", "s/step", "exchange s", "peak MiB"]
    return Table([*header, "last loss"], rows)


def _versions(all_of_them: Sequence[Trained]) -> list[Part]:
    versions = {one.name: one.training.get("versions") or {} for one in all_of_them}
    names = sorted({name for each in versions.values() for name in each})
    if not names:
        return []
    differing = [name for name in names if len({each.get(name) for each in versions.values()}) > 1]
    first = next(iter(versions.values()))
    told = ", ".join(f"{name} {first[name]}" for name in names if name in first)
    parts: list[Part] = [Text(f"Versions: {told}.")]
    if differing:
        parts.append(Text(f"Not the same for all strategies: {', '.join(differing)}."))
    return parts


def _step_parts(one: Compared, oracle: Trained) -> list[Part]:
    parity = one.parity
    shown = list(zip(parity.steps, oracle.steps, strict=True))
    left_out = max(0, len(shown) - MOST_STEPS)
    rows = [
        [
            str(step.step),
            f"{reference.loss:.6g}",
            f"{step.loss:.3g}",
            f"{step.score_chosen:.3g}",
            f"{step.score_rejected:.3g}",
            f"{step.grad_norm:.3g}",
            f"{step.gradient:.3g}" if step.gradient is not None else "-",
            (step.gradient_parameter or "-").removeprefix("base_model.model."),
        ]
        for step, reference in shown[:MOST_STEPS]
    ]
    header = ["step", "loss", "Δ loss", "Δ chosen score", "Δ rejected score", "Δ gradient norm", "Δ gradient", "of"]
    more = f" The last {left_out} steps are in report.json." if left_out else ""
    return [
        Heading(f"{one.name}, step by step"),
        Text(
            "Losses are the oracle's; the rest are differences from the oracle (gradients: relative L2 of the "
            f"parameter that differs most).{more}"
        ),
        Table(header, rows),
        Text(
            f"Final adapter: {parity.adapter:.3g} over all weights; most in `{parity.adapter_parameter}` "
            f"({parity.adapter_worst:.3g})."
        ),
    ]


def _without_sketches(steps: Sequence[StepRecord]) -> list[dict[str, Any]]:
    left_out = ("weights_sketch", "b_sketch", "gradient_sketch")
    return [{name: value for name, value in asdict(step).items() if name not in left_out} for step in steps]
