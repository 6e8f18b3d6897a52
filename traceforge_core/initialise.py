"""Writes a first configuration for somebody's data, model and machine: short, commented, checked.

    written = initialise(Path("my.yaml"), data="~/logs", model="Qwen/Qwen3-8B")
    written.preset, written.command

The file lies over a preset and holds what differs from it; below that stand, commented out, the fields people change
most, with their value in the preset. Nothing is loaded or trained, and no GPU is touched: which preset suits is chosen
from what the driver says (`traceforge doctor` really tries things). Data and model are looked for, not only named.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from traceforge_core.config import DEFAULT_PRESET, PreferenceConfig, RunConfig, SftConfig, load_config
from traceforge_core.doctor.machine import read_gpus, usable_gpus
from traceforge_core.doctor.presets import choose
from traceforge_core.errors import TraceForgeError
from traceforge_core.paths import written
from traceforge_core.runs import not_written

OFTEN_CHANGED = {
    "ingest.outcomes": "files that say which runs solved their case; those inside path are found",
    "model.name": "a folder or a hub id",
    "model.lora.r": "rank of the adapter",
    "datasets.split.held_out": "share of the cases kept for evaluation",
    "datasets.sft.style": "blocks: a sample a turn; native: a sample a run, in the model's own chat format",
    "datasets.sft.outcomes": "resolved: learn only from runs known to have solved their case",
    "datasets.sft.max_length": "tokens; longer histories are trimmed in the middle",
    "datasets.preference.miners": "where pairs come from: outcome, recovery, given, sampled",
    "datasets.preference.max_length": "tokens of a branch; longer pairs are dropped and counted",
    "sft.epochs": "passes over the data",
    "sft.max_steps": "a number ends the training early",
    "sft.learning_rate": "peak",
    "preference.epochs": "passes over the pairs",
    "preference.max_steps": "a number ends the training early",
    "preference.learning_rate": "peak; SimPO wants far less than SFT",
    "preference.beta": "scale of the score difference",
    "preference.simpo_gamma": "target margin, absolute as in TRL",
    "preference.strategy": "branch_parallel: two workers a pair; shared_prefix: one",
}
LOOKED_AT = 20  # files (or folders of events) of the data that are read to see what they are


@dataclass(frozen=True, slots=True)
class Initialised:
    """What was written, the preset it lies over and why that one, what was seen of data and model, the next command."""

    path: Path
    preset: str
    reason: str
    notes: list[str]
    command: str


def initialise(
    out: Path, *, data: str = "samples", model: str | None = None, preset: str | None = None, force: bool = False
) -> Initialised:
    """Write the configuration to `out`.

    data: what `ingest.path` takes. model: what `model.name` takes; None: the preset's. preset: None: what suits this
    machine. Raises TraceForgeError where `out` is there already (unless `force`), there is no data or no such model,
    or the preset is unknown; nothing is written then.
    """
    if out.is_dir() or (out.exists() and not force):
        how = "is a folder: name a file" if out.is_dir() else "is there already. Name another file, or give --force"
        raise TraceForgeError(f"{out} {how}.")
    reason = "as asked for"
    if preset is None:
        preset, _, reason = choose(_gpus(), set(), _installed("bitsandbytes", "unsloth"))
    base = load_config(preset)
    notes = [_look_at_data(data)]
    given = {"ingest.path": data if data == "samples" else str(written(data).resolve())}
    if model is not None and model != base.model.name:
        is_folder = written(model).is_dir()
        given["model.name"] = str(written(model).resolve()) if is_folder else model
        if preset == DEFAULT_PRESET:
            # That preset's rates are for a model that knows nothing yet; they would ruin a pretrained one.
            given["sft.learning_rate"] = SftConfig.model_fields["learning_rate"].default
            given["preference.learning_rate"] = PreferenceConfig.model_fields["learning_rate"].default
    name = given.get("model.name", base.model.name)
    if name != "tiny":
        notes.append(_look_for_model(base, name))

    named = f"--config {shlex.quote(str(out))}"
    text = _document(base, given, preset, reason, named)
    _save(out, text)
    return Initialised(out, preset, reason, notes, f"traceforge run {named}")


def _gpus() -> list[Any]:
    from traceforge_core.training.seats import visible_gpus

    return usable_gpus(read_gpus()[0]) if visible_gpus() else []


def _installed(*names: str) -> set[str]:
    return {name for name in names if next(iter(metadata.distributions(name=name)), None) is not None}


def _look_at_data(data: str) -> str:
    """What the first files hold. Raises TraceForgeError where there is nothing to read."""
    from traceforge_core.trajectories.ingest import corpus_folder
    from traceforge_core.trajectories.reading import read_unit
    from traceforge_core.trajectories.survey import Quarantined, survey

    corpus = survey(corpus_folder(data))
    if not corpus.units:
        raise TraceForgeError(
            f"No trajectory files in {corpus.root}. Give --data a folder or file that holds some (docs/your-data.md)."
        )
    formats: Counter[str] = Counter()
    labelled = bool(corpus.outcome_files)
    problem = None
    for unit in corpus.units[:LOOKED_AT]:
        for item in islice(read_unit(corpus.root, unit), LOOKED_AT):
            if isinstance(item, Quarantined):
                problem = problem or item
            else:
                formats[item.format] += 1
                labelled = labelled or item.outcome is not None
    count = len(corpus.units)
    files = f"{count:,} file{'' if count == 1 else 's'}"
    if not formats:
        what = f"{problem.source}: {problem.reason} {problem.detail}".strip() if problem else "they are empty"
        raise TraceForgeError(
            f"Nothing could be read in the first {min(count, LOOKED_AT)} of {files} in {corpus.root} ({what}). "
            "Are these trajectories? docs/your-data.md lists the formats."
        )
    seen = ", ".join(f"{name}" for name, _ in formats.most_common())
    told = "with outcomes" if labelled else "without outcomes: name a file of them in ingest.outcomes if you have one"
    return f"Data: {files} in {corpus.root} ({seen}), {told}."


def _look_for_model(base: RunConfig, name: str) -> str:
    from traceforge_core.modeling.source import HubUnreachable, find_model

    try:
        found = find_model(base.model.model_copy(update={"name": name}))
    except HubUnreachable as error:
        return f"Model: not checked. {error}"
    kind = (found.config.get("architectures") or ["of an unnamed architecture"])[0]
    return f"Model: {name}, {kind}, {'commit ' + found.revision[:12] if found.revision else 'a local folder'}."


def _document(base: RunConfig, given: dict[str, Any], preset: str, reason: str, named: str) -> str:
    head = [
        f"# TraceForge configuration, over the preset {preset} ({reason}).",
        f"#     traceforge run {named}",
        f"#     traceforge config {named}     every field, with its description and value",
        "# Lines that are commented out show what the preset has; to change a value, take the # away.",
    ]
    return "\n".join(head) + f"\n\npreset: {preset}\n" + _section(base, given, "", "")


def _section(section: Any, given: dict[str, Any], prefix: str, indent: str) -> str:
    """YAML of a section: what is given, and what people often change as comments. "" where it has neither."""
    lines = []
    for name in type(section).model_fields:
        path = f"{prefix}{name}"
        value = getattr(section, name)
        if hasattr(value, "model_fields"):
            inner = _section(value, given, f"{path}.", f"{indent}  ")
            if inner:
                lines.append(f"{indent}{name}:\n{inner}")
        elif path in given:
            differs = f"  # preset: {_yaml(value)}" if given[path] != value else ""
            lines.append(f"{indent}{name}: {_yaml(given[path])}{differs}\n")
        elif path in OFTEN_CHANGED:
            lines.append(f"{indent}# {name}: {_yaml(value)}  # {OFTEN_CHANGED[path]}\n")
    return "".join(lines)


def _yaml(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("...\n").strip()


def _save(out: Path, text: str) -> None:
    """Put the text in place once it has been read back as a valid configuration."""
    scratch = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        load_config(file=scratch)
        scratch.replace(out)
    except OSError as error:
        raise not_written(error, f"write {out}", "Name another file with --out.") from None
    finally:
        scratch.unlink(missing_ok=True)
