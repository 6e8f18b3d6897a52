"""Before a training stage loads anything: does its longest sample fit the GPUs, and which strategy is the faster one?

Both by the planner's estimate (`traceforge_core.longcontext.planner`), from files and the driver alone; no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from traceforge_core.config import RunConfig
from traceforge_core.doctor.machine import read_gpus, usable_gpus, usable_memory
from traceforge_core.errors import TraceForgeError
from traceforge_core.longcontext.estimate import GIB, Kind, Work, estimate_work
from traceforge_core.longcontext.families import why_no_branches, why_no_shared_prefix, why_not_tiled
from traceforge_core.longcontext.memory import Dimensions
from traceforge_core.longcontext.planner import choose_strategy, read_config, read_dimensions, refusal, setup_of
from traceforge_core.training.job import STRATEGIES, Job

logger = logging.getLogger(__name__)


def require_fit(job: Job) -> None:
    """Raise TraceForgeError, naming what would help, where the job's strategy or tiled layers cannot compute its model,
    or cannot hold its longest sample in GPU or host memory.

    Says nothing of memory about what is not computed in tiles, about a CPU, or about a model that cannot be read.
    """
    if job.kind not in ("sft", *STRATEGIES):
        return
    about, dims = config_of(job.model_dir), dimensions(job.model_dir)
    if about is not None and (reason := _unsuited(job, about)):
        raise TraceForgeError(reason)
    gpus = usable_gpus(read_gpus()[0]) if job.device == "cuda" else []
    if dims is None or not gpus:
        return
    work = longest_work(job)
    if work is None or not is_tiled(job, work) or why_not_tiled(about):
        return
    smallest = min(gpus, key=lambda gpu: gpu.memory_total_mib)
    host_gib = usable_memory() / GIB / math.ceil(job.workers / job.hosts)
    setup = setup_of(job.config, job.kind, smallest.memory_total_mib / 1024, host_gib, smallest.name)
    setup = replace(setup, transport="nccl" if job.transport == "nccl" else "gloo")
    rows = job.section.batch_size
    together = longest_work(job, rows) or work
    estimate = estimate_work(dims, together, setup)
    logger.info(
        "The longest %s of %s (%d + %d tokens): planned to take %.1f GiB of GPU and %.1f GiB of host memory.",
        "sample" if rows == 1 else f"{rows} samples in one batch", job.kind,
        together.prompt, together.completion, estimate.peak / GIB, estimate.host / GIB,
    )  # fmt: skip
    if estimate.fits(setup):
        return
    alone = estimate_work(dims, work, setup)
    if not alone.fits(setup):
        raise TraceForgeError(refusal(dims, setup, alone))
    section, passes = "sft" if job.kind == "sft" else "preference", job.section.gradient_accumulation * rows
    raise TraceForgeError(
        f"The longest {rows} samples in one batch ({together.tokens:,} tokens as {work.kind}) need "
        f"{estimate.peak / GIB:.1f} GiB of GPU memory and {estimate.host / GIB:.1f} GiB of host memory; there are "
        f"{setup.gpu_gib:.3g} and {host_gib:.3g} GiB. Set {section}.batch_size=1 "
        f"{section}.gradient_accumulation={passes}: the same step, a sample at a time."
    )


def _unsuited(job: Job, about: Any) -> str | None:
    if job.kind == "shared_prefix":
        return why_no_shared_prefix(about)
    if job.kind == "branch_parallel" and (reason := why_no_branches(about)):
        return reason
    return why_not_tiled(about) if job.section.long_context == "on" else None


def is_tiled(job: Job, work: Work) -> bool:
    """Whether the job computes this work in tiles. The oracle never does: it is TRL as it is."""
    if job.kind in ("oracle", "shared_prefix"):
        return job.kind == "shared_prefix"
    long_context = job.section.long_context
    enough = work.prompt + work.completion >= job.config.long_context.from_tokens
    return long_context == "on" or (long_context == "auto" and enough)


def longest_work(job: Job, rows: int = 1) -> Work | None:
    """The job's longest sample, branch or pair; or the `rows` longest in one batch, which the layers lay end to end, so
    that they take the memory of one as long as all of them. None where its file has none."""
    if job.kind == "sft":
        ids = pq.read_table(job.data, columns=["input_ids"]).column("input_ids")
        tokens = sum(sorted(pc.list_value_length(ids).to_pylist())[-rows:])
        return Work("sft", 0, tokens) if tokens else None
    columns = ["prompt_ids", "chosen_ids", "rejected_ids"]
    table = pq.read_table(job.data, columns=columns)
    lengths = [pc.list_value_length(table.column(name)).to_pylist() for name in columns]
    pairs = [(prompt, max(chosen, rejected)) for prompt, chosen, rejected in zip(*lengths, strict=True)]
    longest = sorted(pairs, key=sum)[-rows:]
    prompt, completion = sum(pair[0] for pair in longest), sum(pair[1] for pair in longest)
    kind: Kind = "shared_prefix" if job.kind == "shared_prefix" else "branch_parallel"
    return Work(kind, prompt, completion) if completion else None


def resolve_strategy(config: RunConfig) -> str:
    """The configured strategy; for `auto` the one that the planner expects to be faster here. Logged with its reason.

    Pairs are taken to be as long as datasets.preference.max_length allows, completions to be a twentieth of that.
    """
    if config.preference.strategy != "auto":
        return config.preference.strategy
    gpus = usable_gpus(read_gpus()[0]) if config.model.device != "cpu" else []
    about = dims = None
    try:
        if gpus:
            about, dims = read_config(config.model.name), read_dimensions(config.model.name)
    except TraceForgeError as error:
        logger.info("%s", error)
    if dims is None:
        chosen, why = "branch_parallel", "there is nothing to plan with: no GPU, or no config of the model"
    elif reason := why_not_tiled(about):  # what it costs is not known
        chosen, why = "branch_parallel", reason.rstrip(".")
    else:
        gib = min(gpu.memory_total_mib for gpu in gpus) / 1024
        setup = setup_of(config, "branch_parallel", gib, None, gpus[0].name)
        completion = max(1, config.datasets.preference.max_length // 20)
        prompt = config.datasets.preference.max_length - completion
        unshared = why_no_shared_prefix(about)
        chosen, why = choose_strategy(dims, setup, prompt, completion, len(gpus), unshared)
    logger.info("Strategy: %s (%s).", chosen, why)
    return chosen


def dimensions(model_dir: Path) -> Dimensions | None:
    """Dimensions of a finished model stage's model; None where its config cannot be read."""
    with contextlib.suppress(TraceForgeError):
        return read_dimensions(*_weights_of(model_dir))
    return None


def config_of(model_dir: Path) -> Any:
    """The configuration of a finished model stage's model (see `read_config`); None where it cannot be read."""
    with contextlib.suppress(TraceForgeError):
        return read_config(*_weights_of(model_dir))
    return None


def _weights_of(model_dir: Path) -> tuple[str, str | None]:
    facts = json.loads((model_dir / "model.json").read_text(encoding="utf-8"))
    beside = model_dir / facts["weights"]
    return (str(beside), None) if beside.is_dir() else (facts["weights"], facts.get("revision"))
