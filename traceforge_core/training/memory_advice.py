"""What fills the GPU in a job, by the planner, and the settings that would make room: for when memory has run out.

told, savers = advice(job)
told      "The planner expects about 42.8 GiB for its longest pair (12,288 + 4,096 tokens): logits 27.8, ..."
savers    ["comparison.oracle_max_length=4096 (compare on cut pairs)", ...], the one for the largest part first
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

from traceforge_core.longcontext.estimate import GIB, Work, estimate_work, untiled_parts
from traceforge_core.longcontext.memory import TILES, Dimensions
from traceforge_core.longcontext.planner import setup_of
from traceforge_core.training.fit import dimensions, is_tiled, longest_work
from traceforge_core.training.job import TRAINING, Job

SHOWN_PARTS = 3


def advice(job: Job) -> tuple[str, list[str]]:
    """One sentence on what takes the memory ("" where that cannot be planned: evaluation, an unusual model), and the
    settings that save some and are not set yet, those that save most first."""
    work, parts = None, dict[str, float]()
    # The message about the memory must come whatever else is wrong with the job's files.
    with contextlib.suppress(Exception):
        work, parts, dims = _planned(job)
    savers = _savers(job)
    if work is None:
        return "", savers
    largest = sorted(parts, key=lambda name: -parts[name])
    shown = ", ".join(f"{name} {parts[name] / GIB:.2g}" for name in largest[:SHOWN_PARTS])
    lengths = f"{work.prompt:,} + {work.completion:,}" if work.prompt else f"{work.completion:,}"
    told = (
        f"The planner expects about {sum(parts.values()) / GIB:.2g} GiB for the longest "
        f"{'sample' if job.kind == 'sft' else 'pair'} ({lengths} tokens), most of it in: {shown}. "
    )
    for_largest = [setting for name in largest if (setting := _for_part(name, job, dims))]
    return told, list(dict.fromkeys([*for_largest[:1], *savers]))


def _planned(job: Job) -> tuple[Work, dict[str, float], Dimensions]:
    dims = dimensions(job.model_dir)
    if dims is None or job.kind not in TRAINING:
        raise ValueError("nothing to plan")
    work = longest_work(job)
    if work is None:
        raise ValueError("nothing to plan")
    if job.cut_to is not None and work.tokens > job.cut_to:
        completion = min(work.completion, job.cut_to)
        work = replace(work, prompt=job.cut_to - completion, completion=completion)
    setup = setup_of(job.config, job.kind, gpu_gib=math.inf, host_gib=None)
    if is_tiled(job, work):
        together = work if job.cut_to is not None else longest_work(job, job.section.batch_size) or work
        return work, estimate_work(dims, together, setup).parts, dims
    branches = 2 if job.kind == "oracle" else 1
    many = branches * job.section.batch_size
    logits = {"sft": 0, "oracle": work.tokens}.get(job.kind, work.completion) * many
    checkpointing = job.section.gradient_checkpointing
    return work, untiled_parts(dims, setup, work.tokens * many, logits, checkpointing=checkpointing), dims


def _for_part(part: str, job: Job, dims: Dimensions) -> str | None:
    """The setting that makes this part smaller; None where it is set already, or there is none."""
    config, section = job.config, "sft" if job.kind == "sft" else "preference"
    if part == "weights":
        return None if config.model.quantization == "nf4" else "model.quantization=nf4"
    if part == "activations of all layers":
        return f"{section}.gradient_checkpointing=true"
    if part in ("layer inputs", "activations of a layer", "logits"):
        return _cut_pairs(job) if job.kind == "oracle" else _tiles(job)
    if part in ("attention", "workspace"):
        enough = (config.long_context.head_groups or 0) >= dims.kv_heads
        return None if enough else f"long_context.head_groups={dims.kv_heads}"
    if part == "tiles":
        return None if (config.long_context.tile or math.inf) <= TILES[-1] else f"long_context.tile={TILES[-1]}"
    if part == "head":
        return None if config.long_context.logprob_chunk <= 256 else "long_context.logprob_chunk=256"
    if part == "inputs on the GPU":
        return "long_context.inputs_on_device=0"
    return None


def _tiles(job: Job) -> str | None:
    section = "sft" if job.kind == "sft" else "preference"
    tiled_already = job.section.long_context == "on" or job.kind == "shared_prefix"
    return None if tiled_already else f"{section}.long_context=on"


def _cut_pairs(job: Job) -> str:
    length = job.config.comparison.oracle_max_length
    return f"comparison.oracle_max_length{f' below {length}' if length else '=4096'} (compare on cut pairs)"


def _savers(job: Job) -> list[str]:
    """Whatever the planner says, in the order in which they help as a rule."""
    model, section, data = job.config.model, job.section, job.config.datasets
    if job.kind == "evaluate":
        savers = [] if model.quantization == "nf4" else ["model.quantization=nf4"]
        return [*savers, f"datasets.preference.max_length below {data.preference.max_length}"]
    name = "sft" if job.kind == "sft" else "preference"
    savers = []
    if model.quantization == "none":
        savers.append("model.quantization=nf4")
    if not section.gradient_checkpointing:
        savers.append(f"{name}.gradient_checkpointing=true")
    if section.batch_size > 1:
        savers.append(f"{name}.batch_size=1 with more {name}.gradient_accumulation")
    if (tiles := _tiles(job)) and job.kind != "oracle":
        savers.append(tiles)
    if job.kind == "oracle":
        savers.append(_cut_pairs(job))
    length = data.sft.max_length if name == "sft" else data.preference.max_length
    savers.append(f"datasets.{name}.max_length below {length}")
    if section.optimizer != "adamw_8bit":
        savers.append(f"{name}.optimizer=adamw_8bit")
    return savers
