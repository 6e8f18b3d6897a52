"""Model cards: README.md beside an adapter or an exported model, with what it was made from and how it fared.

    write_adapter_card(out_dir / "adapter", "sft", config, inputs, figures)       # at the end of a training stage

The front matter is what the Hugging Face hub reads. Nothing of the user's machine is in a card: no local path, no host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from traceforge_core.config import RunConfig
from traceforge_core.export.vllm_layout import LORA_RANKS
from traceforge_core.runs import installed_versions, read_figures

METHODS = {
    "sft": "supervised fine-tuning with TRL's SFTTrainer",
    "oracle": "SimPO with TRL's CPOTrainer",
    "branch_parallel": "SimPO, Branch-Parallel: the chosen and the rejected branch of a pair on a worker each",
    "shared_prefix": "SimPO with both branches of a pair in one sequence behind their shared prompt",
}
USE_ADAPTER = """\
```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("PATH_TO_THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("{base}")
```"""
USE_MODEL = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH_TO_THIS_FOLDER", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("PATH_TO_THIS_FOLDER")
```

or `vllm serve PATH_TO_THIS_FOLDER`."""
SERVE_ADAPTER = """

or beside the base:

    vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules tuned=PATH_TO_THIS_FOLDER"""


def write_adapter_card(
    adapter: Path, stage: str, config: RunConfig, inputs: Mapping[str, Path], figures: Mapping[str, Any]
) -> None:
    """Put README.md into an adapter folder at the end of its training stage.

    inputs: folders of the stages that it was trained from (model, datasets, perhaps sft); figures: the stage's own.
    How the adapter compares with the oracle is not known yet then: the card of an export has it.
    """
    model = json.loads((inputs["model"] / "model.json").read_text(encoding="utf-8"))
    stages = {stage: figures, "datasets": read_figures(inputs["datasets"])}
    if stage != "sft" and "sft" in inputs:
        stages["sft"] = read_figures(inputs["sft"])
    write_card(adapter, "adapter", stage, config, model, stages)


def write_card(
    folder: Path,
    kind: str,
    stage: str,
    config: RunConfig,
    model: Mapping[str, Any],
    stages: Mapping[str, Mapping[str, Any]],
    check: Mapping[str, Any] | None = None,
) -> None:
    """Write README.md. kind: "adapter" or "merged". stages: figures of finished stages by name. check: the figures of
    the export's logits check."""
    base = model["name"] if is_on_hub(model) else None
    front: dict[str, Any] = {
        "library_name": "peft" if kind == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["traceforge", "coding-agent", "lora", "trl", "sft" if stage == "sft" else "simpo"],
    }
    if base:
        front = {"base_model": base, "base_model_relation": "adapter" if kind == "adapter" else "finetune"} | front
    name = model["name"] if base or model["name"] == "tiny" else Path(model["name"]).name
    what = "LoRA adapter for" if kind == "adapter" else "Merged weights of"
    parts = [
        f"# {name}, tuned on coding agents' trajectories",
        f"{what} `{name}` after {METHODS[stage]}, made by TraceForge."
        + (" It went on from an SFT adapter." if stage != "sft" and "sft" in stages else ""),
        "## Use",
        _use(kind, config, base or "PATH_TO_THE_BASE_MODEL"),
        "## Data",
        _data(stages.get("datasets", {})),
        "## Training",
        _training(stages, stage),
    ]
    if stages.get("evaluate", {}).get("accuracy"):
        parts += ["## Evaluation on held-out data", _evaluation(stages["evaluate"])]
    parts += ["## Checks", _checks(stages, stage, check)]
    if check is not None and (how := _base_weights(config, check)):
        parts.append(how)
    parts += ["## Configuration", f"```yaml\n{_configuration(config, stage)}```"]
    versions = ", ".join(f"{package} {version}" for package, version in installed_versions().items())
    parts += ["## Versions", versions]
    text = f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n" + "\n\n".join(parts) + "\n"
    (folder / "README.md").write_text(text, encoding="utf-8")


def _use(kind: str, config: RunConfig, base: str) -> str:
    if kind != "adapter":
        return USE_MODEL
    rank = next((rank for rank in LORA_RANKS if rank >= config.model.lora.r), None)
    return USE_ADAPTER.format(base=base) + (SERVE_ADAPTER.format(base=base, rank=rank) if rank else "")


def is_on_hub(model: Mapping[str, Any]) -> bool:
    """Whether model.json names a hub id (and not a folder, whose name would mean nothing to others)."""
    named: bool = model["name"] != "tiny" and model["weights"] == model["name"]
    return named


def _data(figures: Mapping[str, Any]) -> str:
    miners = ", ".join(f"{miner} {count}" for miner, count in (figures.get("pairs_by_miner") or {}).items())
    rows = {
        "SFT samples": figures.get("sft_samples"),
        "SFT samples held out": figures.get("sft_held_out"),
        "preference pairs": figures.get("pairs"),
        "preference pairs held out": figures.get("pairs_held_out"),
        "pairs by miner": miners or None,
    }
    return _table(("", "count"), [(name, value) for name, value in rows.items() if value is not None])


def _training(stages: Mapping[str, Mapping[str, Any]], stage: str) -> str:
    names = [name for name in dict.fromkeys(("sft", stage)) if name in stages]
    shown = (
        "steps",
        "tokens",
        "first_loss",
        "last_loss",
        "last_margin",
        "seconds_per_step",
        "peak_memory_mib",
        "device",
    )
    rows = [
        (figure.replace("_", " "), *(_plain(stages[name].get(figure)) for name in names))
        for figure in shown
        if any(stages[name].get(figure) is not None for name in names)
    ]
    return _table(("", *names), rows)


def _evaluation(figures: Mapping[str, Any]) -> str:
    columns = [figures[key] for key in ("accuracy", "margin", "action_loss", "token_accuracy")]
    head = ("model", "pair accuracy", "margin", "next-action loss", "token accuracy")
    rows = [(name, *(_plain(column[name]) for column in columns)) for name in figures["accuracy"]]
    return f"Cases not trained on; pairs: {figures['pairs']}, next actions: {figures['actions']}.\n\n" + _table(
        head, rows
    )


def _checks(stages: Mapping[str, Mapping[str, Any]], stage: str, check: Mapping[str, Any] | None) -> str:
    lines = []
    compared = stages.get("compare", {})
    if stage == "sft":
        lines.append("- Agreement with TRL's CPOTrainer concerns preference training; this is SFT alone.")
    elif stage == "oracle":
        lines.append("- Trained by TRL's own CPOTrainer, which is what the other strategies are compared with.")
    elif stage in compared:
        told = ", ".join(
            f"{key.replace('_', ' ')} {_plain(value)}" for key, value in compared[stage].items() if key != "verdict"
        )
        lines.append(f"- Agreement with TRL's CPOTrainer on the same data: **{compared[stage]['verdict']}** ({told}).")
    else:
        lines.append("- Agreement with TRL's CPOTrainer: not compared when this card was written.")
    if check is not None:
        lines.append(
            f"- These weights against base and adapter apart, in {check['dtype']}: **{check['verdict']}**. Logits "
            f"differ by {check['difference']:.2g} (RMS; largest {check['largest']:.2g}); rounding the weights moves "
            f"them by {check['rounding']:.2g}, the adapter by {check['adapter_effect']:.2g}."
        )
    return "\n".join(lines)


def _base_weights(config: RunConfig, check: Mapping[str, Any]) -> str | None:
    """What the adapter was merged into, where that is not just the base it was trained on."""
    if check.get("base") == "unpacked":
        return (
            f"The base checkpoint is quantised itself. It was unpacked to {check['dtype']} before the merge: its "
            "weights are what the quantised numbers stand for, no finer than they."
        )
    if config.model.quantization == "nf4":
        return (
            "The adapter was trained on the base in NF4. Here it is merged into the base's original weights, which "
            "differ from those by NF4's rounding."
        )
    return None


def _configuration(config: RunConfig, stage: str) -> str:
    tree = config.model_dump(mode="json")
    kept = {"model": tree["model"], "datasets": tree["datasets"], "sft": tree["sft"]}
    if stage != "sft":
        kept["preference"] = tree["preference"]
    kept["model"].pop("name")
    kept["datasets"]["preference"].pop("given")
    text: str = yaml.safe_dump(kept, sort_keys=False)
    return text


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
