"""The training stages: each a job for the launcher, and the figures of what its workers left behind.

Stage functions as `traceforge_core.stages` calls them. Nothing here imports torch: models live in the workers.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from traceforge_core.config import ModelConfig, RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.export.model_card import write_adapter_card
from traceforge_core.runs.disk import ALWAYS, adapter_bytes, checkpoint_bytes
from traceforge_core.training.fit import require_fit
from traceforge_core.training.job import STRATEGIES, TRAINING, Job, Kind
from traceforge_core.training.launch import OnLine, launch
from traceforge_core.training.records import read_records
from traceforge_core.training.seats import seats, visible_gpus
from traceforge_core.training.trackers import require_trackers

logger = logging.getLogger(__name__)

TRAINERS: dict[Kind, str] = {
    "sft": "traceforge_core.training.sft:SftTrainer",
    "oracle": "traceforge_core.training.pair_trainer:PairTrainer",
    "branch_parallel": "traceforge_core.training.branch_parallel:BranchParallelTrainer",
    "shared_prefix": "traceforge_core.training.shared_prefix:SharedPrefixTrainer",
}


def train_sft(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> dict[str, Any]:
    """SFT on one worker. Leaves adapter/, metrics.jsonl, training.json, logs/."""
    return _train(sft_job(config, inputs, out_dir), inputs)


def train_oracle(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> dict[str, Any]:
    """SimPO with TRL's own CPOTrainer on one worker; on cut pairs where `comparison.oracle_max_length` says so."""
    return _train(oracle_job(config, inputs, out_dir), inputs)


def train_branch_parallel(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> dict[str, Any]:
    """SimPO with a worker a branch, two for each replica."""
    return _train_strategy(preference_job("branch_parallel", config, inputs, out_dir), inputs)


def train_shared_prefix(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> dict[str, Any]:
    """SimPO with both branches in one sequence, one worker for each replica."""
    return _train_strategy(preference_job("shared_prefix", config, inputs, out_dir), inputs)


def _train_strategy(job: Job, inputs: Mapping[str, Path]) -> dict[str, Any]:
    """Train a strategy, after what the comparison needs of it where the oracle cannot hold whole pairs: `proof/`, the
    oracle's cut pairs and steps. Resumed, a finished proof is not repeated."""
    if job.config.comparison.oracle_max_length is None:
        return _train(job, inputs)
    proof = _proof_of(job, job.out_dir / "proof")
    if not (proof.out_dir / "training.json").exists():
        logger.info("First the proof: %d steps on pairs cut to %d tokens.", proof.section.max_steps, proof.cut_to)
        proof.out_dir.mkdir(parents=True, exist_ok=True)
        run_job(proof)
    comparison = job.config.comparison.model_copy(update={"gradient_steps": 0})
    return _train(replace(job, config=job.config.model_copy(update={"comparison": comparison})), inputs)


def _proof_of(job: Job, out_dir: Path | None = None) -> Job:
    """The same job on cut pairs, for as many steps as the oracle takes."""
    comparison = job.config.comparison
    preference = job.config.preference.model_copy(update={"max_steps": comparison.oracle_steps})
    config = job.config.model_copy(update={"preference": preference})
    return replace(job, config=config, out_dir=out_dir or job.out_dir, cut_to=comparison.oracle_max_length)


def _train(job: Job, inputs: Mapping[str, Path]) -> dict[str, Any]:
    result = run_job(job)
    write_adapter_card(job.out_dir / "adapter", job.kind, job.config, inputs, result)
    return result


def sft_job(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> Job:
    """The job of the SFT stage. Raises TraceForgeError where device or backend cannot be had."""
    device = resolve_device(config.model)
    samples = inputs["datasets"] / "sft"
    return Job(
        kind="sft",
        trainer=TRAINERS["sft"],
        config=config,
        model_dir=inputs["model"],
        data=samples / "train.parquet",
        held_out=_held_out(config.sft.evaluate, samples),
        out_dir=out_dir,
        device=device,
        backend=resolve_backend(config.model, device),
    )


def preference_job(kind: Kind, config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> Job:
    """The job of a preference stage: the same but for the trainer and the workers, whatever the strategy."""
    device = resolve_device(config.model)
    pairs = inputs["datasets"] / "preference"
    branches, replicas = _mesh(kind, config)
    transport = resolve_transport(config, device, branches * replicas, 1 if kind == "oracle" else config.hosts.count)
    if branches * replicas > 1:
        why = "a GPU each" if transport == "nccl" else "no GPU each"
        why = why if config.preference.transport == "auto" else "as configured"
        logger.info("Gradients travel over %s (%s).", transport, why)
    return Job(
        kind=kind,
        trainer=TRAINERS[kind],
        config=config,
        model_dir=inputs["model"],
        data=pairs / "train.parquet",
        held_out=_held_out(config.preference.evaluate, pairs),
        out_dir=out_dir,
        adapter=inputs["sft"] / "adapter" if "sft" in inputs else None,
        branches=branches,
        replicas=replicas,
        device=device,
        backend="transformers" if kind == "oracle" else resolve_backend(config.model, device),
        transport=transport,
    )


def _mesh(kind: str, config: RunConfig) -> tuple[int, int]:
    """Branches and replicas of a preference stage."""
    return 2 if kind == "branch_parallel" else 1, 1 if kind == "oracle" else config.preference.replicas


def require_machine(names: Sequence[str], config: RunConfig) -> None:
    """Raises TraceForgeError where this machine has not the GPUs that these stages will ask for, or a library for them
    is missing; better now than after the model has been downloaded and SFT has taken hours."""
    device = resolve_device(config.model)
    resolve_backend(config.model, device)
    for name in TRAINING:
        if name in names:
            require_optimizer("sft" if name == "sft" else "preference", config, device)
    nowhere = Path()
    for kind in STRATEGIES:
        if kind in names:
            branches, replicas = _mesh(kind, config)
            resolve_transport(config, device, branches * replicas, config.hosts.count)
            job = Job(
                kind, TRAINERS[kind], config, nowhere, nowhere, nowhere, branches=branches, replicas=replicas,
                device=device,
            )  # fmt: skip
            seats(job, share_gpu=config.preference.share_gpu)


def require_trainings(names: Sequence[str], config: RunConfig, model_dir: Path, datasets: Path) -> None:
    """`require_fit` for every training among these stages: what the last of them cannot do is told before the first
    takes its hours. Raises TraceForgeError."""
    kinds: list[Kind] = [kind for kind in ("sft", *STRATEGIES) if kind in names]
    device = resolve_device(config.model) if kinds else "cpu"
    for kind in kinds:
        data = datasets / ("sft" if kind == "sft" else "preference") / "train.parquet"
        branches, replicas = (1, 1) if kind == "sft" else _mesh(kind, config)
        transport = resolve_transport(config, device, branches * replicas, config.hosts.count)
        job = Job(kind, TRAINERS[kind], config, model_dir, data, Path(), branches=branches, replicas=replicas)
        require_fit(replace(job, device=device, transport=transport))


def oracle_job(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> Job:
    """The job of the oracle's stage: whole pairs, or cut ones where it could not hold them."""
    job = preference_job("oracle", config, inputs, out_dir)
    return job if config.comparison.oracle_max_length is None else _proof_of(job)


def run_job(job: Job, on_line: OnLine | None = None) -> dict[str, Any]:
    """Launch a job, wait for its end, tidy up, and say what came out."""
    require_trackers(job.config)
    require_optimizer("sft" if job.kind == "sft" else "preference", job.config, job.device)
    require_fit(job)
    gpus = seats(job, share_gpu=job.config.preference.share_gpu)
    room = ALWAYS + checkpoint_bytes(adapter_bytes(job.config, job.model_dir))
    launch(job, gpus, on_line=on_line, room=room)
    shutil.rmtree(job.out_dir / "checkpoints", ignore_errors=True)
    return figures(job)


def figures(job: Job) -> dict[str, Any]:
    """The numbers worth showing of a finished job."""
    records = read_records(job.out_dir / "metrics.jsonl")
    training = json.loads((job.out_dir / "training.json").read_text(encoding="utf-8"))
    seconds = [record.seconds for record in records if record.seconds is not None]
    result: dict[str, Any] = {
        "steps": len(records),
        "first_loss": records[0].loss,
        "last_loss": records[-1].loss,
        "tokens": sum(record.tokens or 0 for record in records),
        "seconds_per_step": sum(seconds) / len(seconds),
        "exchange_seconds_per_step": sum(record.exchange_seconds for record in records) / len(records),
        "peak_memory_mib": max(record.peak_memory_mib or 0.0 for record in records),
        "workers": job.workers,
        "device": training["device_name"],
        "backend": job.backend,
    }
    if job.kind != "sft":
        result["last_margin"] = records[-1].margin
    if job.workers > 1:
        result["transport"] = job.transport
    if training["held_out"]:
        result["held_out"] = training["held_out"]
    return result


def resolve_device(model: ModelConfig) -> str:
    """ "cpu" or "cuda". Raises TraceForgeError where a GPU is asked for and there is none."""
    if model.device == "cpu":
        device = "cpu"
    else:
        gpus = visible_gpus()
        if model.device == "cuda" and not gpus:
            raise TraceForgeError(
                "model.device is cuda, but no GPU can be used here (no NVIDIA driver, CUDA_VISIBLE_DEVICES hides it, "
                "or the installed torch has no CUDA). `traceforge doctor` says more. Set model.device to cpu or auto."
            )
        device = "cuda" if gpus else "cpu"
    if model.quantization == "nf4" and device == "cpu":
        raise TraceForgeError(
            "model.quantization nf4 needs a CUDA GPU, and none can be used here (`traceforge doctor` says why). For a "
            "small model on the CPU set it to none."
        )
    return device


def resolve_backend(model: ModelConfig, device: str) -> str:
    """ "transformers" or "unsloth". Raises TraceForgeError where Unsloth is asked for and cannot work."""
    installed = importlib.util.find_spec("unsloth") is not None
    if model.backend == "unsloth":
        if not installed:
            raise TraceForgeError(
                "model.backend is unsloth, which is not installed. Install it (pip install 'traceforge-core[unsloth]') "
                "or set model.backend to transformers."
            )
        if device == "cpu":
            raise TraceForgeError("model.backend unsloth needs a CUDA GPU. Set model.backend to transformers.")
        return "unsloth"
    if model.backend == "auto" and device == "cuda" and installed:
        return "unsloth"
    return "transformers"


def require_optimizer(section: Literal["sft", "preference"], config: RunConfig, device: str) -> None:
    """Raises TraceForgeError where a section's optimizer cannot run here."""
    if getattr(config, section).optimizer != "adamw_8bit":
        return
    if device == "cpu":
        raise TraceForgeError(f"{section}.optimizer adamw_8bit needs a CUDA GPU. Set it to adamw_torch.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise TraceForgeError(
            f"{section}.optimizer adamw_8bit needs bitsandbytes, which is not installed. Install it (pip install "
            "bitsandbytes) or set it to adamw_torch."
        )


def resolve_transport(config: RunConfig, device: str, workers: int, hosts: int = 1) -> str:
    """ "nccl" where every worker has a GPU of its own, else "gloo". The hosts are taken to be alike."""
    wanted = config.preference.transport
    own_gpus = device == "cuda" and len(visible_gpus()) * hosts >= workers
    if wanted == "nccl" and not own_gpus:
        raise TraceForgeError(
            "preference.transport is nccl, which needs a GPU of its own for every worker. Set it to auto or gloo."
        )
    return wanted if wanted != "auto" else ("nccl" if own_gpus else "gloo")


def _held_out(wanted: bool, folder: Path) -> Path | None:
    path = folder / "held_out.parquet"
    if not wanted or not path.exists():
        return None
    import pyarrow.parquet as pq

    return path if pq.read_metadata(path).num_rows else None
