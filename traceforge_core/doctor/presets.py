"""Which of the shipped presets suits a machine.

A preset is for cards of the memory that its name ends with (`qwen3-8b-1x80gb`), and for as many of them as its strategy
has workers: two a replica for branch_parallel, one for shared_prefix. Of those that fit, the one for the most memory,
then for the most cards, is chosen.
"""

from __future__ import annotations

import re

from traceforge_core.config import DEFAULT_PRESET, load_config, preset_names
from traceforge_core.doctor.machine import Gpu

SLACK = 0.9  # a "24 GB" card shows 23.6 GiB, an "80 GB" one 79.1


def choose(gpus: list[Gpu], failed: set[str], packages: set[str]) -> tuple[str, list[str], str]:
    """The preset, the settings to add to it, and why.

    failed: names of trials that did not work. packages: names of installed packages.
    """
    modern = [gpu for gpu in gpus if gpu.bf16]
    smallest = min((gpu.memory_total_mib / 1024 for gpu in modern), default=0.0)
    fitting = []
    for name in preset_names():
        memory = _memory_in_name(name)
        if memory is not None and memory * SLACK <= smallest and (cards := cards_of(name)) <= len(modern):
            fitting.append((memory, cards, name))
    if not fitting:
        return DEFAULT_PRESET, [], _why_not(gpus, modern, smallest)
    _, cards, name = max(fitting)
    settings = []
    if "bf16 products" in failed:
        settings.append("model.cublaslt=on")
    if cards > 1 and "NCCL" in failed:
        settings.append("preference.transport=gloo")
    if "unsloth" in failed:
        settings.append("model.backend=transformers")
    if load_config(name).model.quantization == "nf4" and ("NF4" in failed or "bitsandbytes" not in packages):
        return DEFAULT_PRESET, [], f"{name} would suit, but it needs NF4: install a bitsandbytes that works here first."
    return name, settings, f"{len(modern)} GPU{'s' if len(modern) > 1 else ''} of at least {smallest:.0f} GiB"


def cards_of(name: str) -> int:
    """How many cards a preset's preference training uses."""
    preference = load_config(name).preference
    return preference.replicas * (2 if preference.strategy == "branch_parallel" else 1)


def _memory_in_name(name: str) -> int | None:
    found = re.search(r"(\d+)gb$", name)
    return int(found[1]) if found else None


def _why_not(gpus: list[Gpu], modern: list[Gpu], smallest: float) -> str:
    if not gpus:
        return "no GPU that can be used: the tiny model, on the CPU"
    if not modern:
        return "no GPU with bf16 (compute capability 8.0): the tiny model, on the CPU"
    return f"no preset is made for {smallest:.0f} GiB of GPU memory: start from the tiny one and set model.name"
