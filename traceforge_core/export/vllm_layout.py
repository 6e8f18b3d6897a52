"""Whether a model or adapter folder is what vLLM's loader expects, looked up file by file; vLLM need not be installed.

    for problem in model_problems(Path("my-model")): ...
    for problem in adapter_problems(Path("runs/X/sft/adapter")): ...

What vLLM documents and checks (0.10 to 0.11: docs "LoRA Adapters"; `vllm/lora/peft_helper.py`, its default weight
loader): config.json with `architectures`; safetensors under the architecture's own names, all that an index lists;
a tokenizer with its chat template, and what ends a turn in generation_config.json. Of an adapter: PEFT's LoRA with a
rank that `--max-lora-rank` can be set to, no bias, no DoRA, no modules saved whole, names as PEFT writes them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What `--max-lora-rank` takes; an adapter of a lower rank is served with the next one."""


def model_problems(folder: Path) -> list[str]:
    """What keeps vLLM from serving a merged model; empty where nothing does."""
    config, problems = _read(folder / "config.json")
    if not config.get("architectures"):
        problems.append("config.json names no architectures")
    if config.get("quantization_config"):
        problems.append("config.json has a quantization_config, but the weights are not quantised")
    names, missing = _tensor_names(folder)
    problems += missing
    odd = sorted(name for name in names if "lora_" in name or name.startswith("base_model."))
    if odd:
        problems.append(f"{len(odd)} tensors have an adapter's names, such as {odd[0]}")
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer.model").is_file():
        problems.append("there is no tokenizer.json")
    tokenizer, unreadable = _read(folder / "tokenizer_config.json")
    problems += unreadable
    if not (folder / "chat_template.jinja").is_file() and not tokenizer.get("chat_template"):
        problems.append("the tokenizer has no chat template")
    generation, unreadable = _read(folder / "generation_config.json")
    problems += unreadable
    if generation.get("eos_token_id") is None:
        problems.append("generation_config.json does not say which token ends a turn")
    return problems


def adapter_problems(folder: Path) -> list[str]:
    """What keeps vLLM from serving an adapter beside its base; empty where nothing does."""
    config, problems = _read(folder / "adapter_config.json")
    rank, targets = config.get("r"), config.get("target_modules")
    if config.get("peft_type") != "LORA":
        problems.append(f"peft_type is {config.get('peft_type')}")
    if not isinstance(rank, int) or rank > LORA_RANKS[-1]:
        problems.append(f"the rank is {rank}; at most {LORA_RANKS[-1]} can be served")
    if not config.get("lora_alpha"):
        problems.append("lora_alpha is missing")
    if not targets:
        problems.append("target_modules is missing")
    wanted: dict[str, tuple[Any, ...]] = {
        "bias": ("none", None),
        "use_dora": (False, None),
        "modules_to_save": (None, []),
    }
    problems += [f"{name} is {config.get(name)!r}" for name, good in wanted.items() if config.get(name) not in good]
    names, missing = _tensor_names(folder, "adapter_model")
    problems += missing
    shape = re.compile(r"base_model\.model\..*\.([^.]+)\.lora_[AB]\.weight")
    for name in sorted(names):
        found = shape.fullmatch(name)
        if found is None or (isinstance(targets, list) and found[1] not in targets):
            problems.append(f"the tensor {name} does not belong to a layer that target_modules names")
            break
    return problems


def _read(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return (content, []) if isinstance(content, dict) else ({}, [f"{path.name} holds no object"])
    except (OSError, ValueError) as error:
        return {}, [f"{path.name} cannot be read: {error}"]


def _tensor_names(folder: Path, stem: str = "model") -> tuple[set[str], list[str]]:
    """Names of all tensors on disk, and what is wrong with the files. Where there is an index, it has the say."""
    from safetensors import SafetensorError, safe_open

    index = folder / f"{stem}.safetensors.index.json"
    listed: dict[str, str] = {}
    problems: list[str] = []
    if index.is_file():
        content, problems = _read(index)
        listed = content.get("weight_map", {})
    names: set[str] = set()
    for file in sorted(set(listed.values()) or {f"{stem}.safetensors"}):
        try:
            with safe_open(folder / file, framework="numpy") as tensors:
                names |= set(tensors.keys())
        except (OSError, SafetensorError) as error:
            problems.append(f"{file} cannot be read: {error}")
    if lost := sorted(set(listed) - names):
        problems.append(f"the index lists {len(lost)} tensors that are in no file, such as {lost[0]}")
    return names, problems
