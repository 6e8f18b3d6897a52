"""Before a training stage loads anything: does its longest sample fit the GPUs, and which strategy is the faster one?

Both by the planner's estimate (`traceforge_core.longcontext.planner`), from files and the driver alone; no torch.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from traceforge_core.config import RunConfig
from traceforge_core.doctor.machine import read_gpus, usable_gpus
from traceforge_core.errors import TraceForgeError
from traceforge_core.longcontext.estimate import GIB, Kind, Work, estimate_work
from traceforge_core.longcontext.memory import Dimensions
from traceforge_core.longcontext.planner import choose_strategy, read_dimensions, refusal, setup_of
from traceforge_core.training.job import Job

logger = logging.getLogger(__name__)


def require_fit(job: Job) -> None:
    """Raise TraceForgeError, naming what would help, where tiled layers cannot hold the job's longest sample.

    Says nothing about what is not computed in tiles, about a CPU, or about a model whose dimensions cannot be read.
    """
    if job.device != "cuda" or job.kind not in ("sft", "branch_parallel", "shared_prefix"):
        return
    work = longest_work(job)
    dims = dimensions(job.model_dir)
    gpus = usable_gpus(read_gpus()[0])
    if not is_tiled(job, work) or dims is None or not gpus:
        return
    smallest = min(gpus, key=lambda gpu: gpu.memory_total_mib)
    setup = setup_of(job.config, job.kind, smallest.memory_total_mib / 1024, None, smallest.name)
    setup = replace(setup, transport="nccl" if job.transport == "nccl" else "gloo")
    estimate = estimate_work(dims, work, setup)
    logger.info(
        "The longest sample (%d + %d tokens) is planned to take %.1f GiB of GPU and %.1f GiB of host memory.",
        work.prompt, work.completion, estimate.peak / GIB, estimate.host / GIB,
    )  # fmt: skip
    if not estimate.fits(setup):
        raise TraceForgeError(refusal(dims, setup, estimate))


def is_tiled(job: Job, work: Work) -> bool:
    """Whether the job computes this work in tiles. The oracle never does: it is TRL as it is."""
    if job.kind in ("oracle", "shared_prefix"):
        return job.kind == "shared_prefix"
    long_context = job.section.long_context
    enough = work.prompt + work.completion >= job.config.long_context.from_tokens
    return long_context == "on" or (long_context == "auto" and enough)


def longest_work(job: Job) -> Work:
    """The job's longest sample, branch or pair."""
    if job.kind == "sft":
        ids = pq.read_table(job.data, columns=["input_ids"]).column("input_ids")
        return Work("sft", 0, pc.max(pc.list_value_length(ids)).as_py())
    columns = ["prompt_ids", "chosen_ids", "rejected_ids"]
    table = pq.read_table(job.data, columns=columns)
    lengths = [pc.list_value_length(table.column(name)).to_pylist() for name in columns]
    rows = ((prompt, max(chosen, rejected)) for prompt, chosen, rejected in zip(*lengths, strict=True))
    prompt, completion = max(rows, key=sum)
    kind: Kind = "shared_prefix" if job.kind == "shared_prefix" else "branch_parallel"
    return Work(kind, prompt, completion)


def resolve_strategy(config: RunConfig) -> str:
    """The configured strategy; for `auto` the one that the planner expects to be faster here. Logged with its reason.

    Pairs are taken to be as long as datasets.preference.max_length allows, completions to be a twentieth of that.
    """
    if config.preference.strategy != "auto":
        return config.preference.strategy
    gpus = usable_gpus(read_gpus()[0]) if config.model.device != "cpu" else []
    try:
        dims = read_dimensions(config.model.name) if gpus else None
    except TraceForgeError as error:
        logger.info("%s", error)
        dims = None
    if dims is None:
        chosen, why = "branch_parallel", "there is nothing to plan with: no GPU, or no config of the model"
    else:
        gib = min(gpu.memory_total_mib for gpu in gpus) / 1024
        setup = setup_of(config, "branch_parallel", gib, None, gpus[0].name)
        completion = max(1, config.datasets.preference.max_length // 20)
        prompt = config.datasets.preference.max_length - completion
        chosen, why = choose_strategy(dims, setup, prompt, completion, len(gpus))
    logger.info("Strategy: %s (%s).", chosen, why)
    return chosen


def dimensions(model_dir: Path) -> Dimensions | None:
    """Dimensions of a finished model stage's model; None where its config cannot be read."""
    facts = json.loads((model_dir / "model.json").read_text(encoding="utf-8"))
    beside = model_dir / facts["weights"]
    try:
        return read_dimensions(str(beside) if beside.is_dir() else facts["weights"])
    except TraceForgeError:
        return None
