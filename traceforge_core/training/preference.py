"""A worker's way through a preference stage, the same for every strategy: load, agree, train, save.

`train` is what the worker calls with the strategy's trainer. How a worker goes on from a checkpoint, evaluates and
writes `training.json` is also SFT's way.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PrinterCallback

from traceforge_core.errors import TraceForgeError
from traceforge_core.longcontext.enable import enable_long_context
from traceforge_core.modeling.adapters import hash_adapter, save_adapter
from traceforge_core.modeling.loading import load_model
from traceforge_core.runs import installed_versions, write_json
from traceforge_core.training.agreement import agree_on_start
from traceforge_core.training.arguments import shared_arguments
from traceforge_core.training.job import Job
from traceforge_core.training.mesh import Mesh
from traceforge_core.training.pair_trainer import PairTrainer
from traceforge_core.training.pairs import PairDataset
from traceforge_core.training.records import truncate_records
from traceforge_core.training.trl_original import original

if TYPE_CHECKING:
    from trl.experimental.cpo import CPOConfig
else:
    CPOConfig = original("trl.experimental.cpo.cpo_config", "CPOConfig")

logger = logging.getLogger(__name__)


def preference_arguments(job: Job, rank: int) -> CPOConfig:
    """TRL's arguments for this job. Every strategy gets the same; only rank 0 saves and reports."""
    section = job.config.preference
    return CPOConfig(
        **shared_arguments(job, rank),
        loss_type="simpo",
        beta=section.beta,
        simpo_gamma=section.simpo_gamma,
        cpo_alpha=section.cpo_alpha,
        label_smoothing=section.label_smoothing,
        disable_dropout=True,
        max_length=job.config.datasets.preference.max_length,  # unused: pairs are tokens of the right length already
        remove_unused_columns=False,
    )


def train(
    job: Job,
    mesh: Mesh,
    trainer_class: type[PairTrainer],
    beat: Callable[[str], None],
    load: Callable[..., tuple[Any, Any]] = load_model,
) -> None:
    """A worker's way through a preference stage: load, agree, train (from the last checkpoint), save.

    `load` is `load_model`, or does the same with a model that is there already.
    """
    if job.planted_fault is not None:
        from traceforge_core.comparison.faults.registry import plant

        trainer_class = plant(job.planted_fault, trainer_class)
        logger.warning("The fault %s is planted in this worker, to see whether it is found.", job.planted_fault)
    pairs = PairDataset(job.data, cut_to=job.cut_to)
    held_out = PairDataset(job.held_out, cut_to=job.cut_to) if job.held_out is not None else None
    beat("loading the model")
    model, tokenizer = load(
        job.model_dir,
        job.config.model,
        device=job.device,
        backend=job.backend,
        max_length=max(pairs.longest(), held_out.longest() if held_out else 0),
        adapter=job.adapter,
        seed=job.section.seed,
        gradient_checkpointing=job.section.gradient_checkpointing,
    )
    trainer = trainer_class(
        model=model,
        args=preference_arguments(job, mesh.rank),
        train_dataset=pairs,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    if trainer.aux_loss_enabled:
        raise TraceForgeError(
            "This model adds a router loss over all tokens of both branches (output_router_logits), which does not "
            "fall into a part a branch. Set output_router_logits to false in its config.json."
        )
    mode = job.section.long_context if trainer.tiles == "as configured" else trainer.tiles
    enable_long_context(model, mode, job.config.long_context)
    trainer.mesh = mesh
    trainer.keeps_tail = job.backend == "unsloth"
    trainer.record_into(
        job.out_dir,
        writes=mesh.rank == 0,
        saved_gradient_steps=job.config.comparison.gradient_steps,
        beat=beat,
        stop_file=job.stop_file,
    )
    if job.workers > 1:
        beat("waiting for the other workers to have loaded the model")
    start = agree_on_start(mesh, trainer, job)
    checkpoint = agree_on_checkpoint(job, mesh)
    before = evaluate(trainer, beat) if held_out and checkpoint is None else None
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    after = evaluate(trainer, beat) if held_out else None
    if mesh.rank == 0:
        save_adapter(trainer.model, job.out_dir / "adapter")
        write_training(job, trainer, start, checkpoint, {"before": before, "after": after} if held_out else None)
    beat("waiting for rank 0 to save the adapter")
    mesh.gather([0.0])


def evaluate(trainer: Any, beat: Callable[[str], None]) -> dict[str, float]:
    """Loss, accuracy and margin on the held-out pairs, as TRL computes them."""
    beat("evaluating")
    metrics = trainer.evaluate()
    return {name.removeprefix("eval_"): value for name, value in metrics.items() if isinstance(value, float)}


def agree_on_checkpoint(job: Job, mesh: Mesh) -> Path | None:
    """The checkpoint that all workers go on from (rank 0's choice), with the step log cut back to it; None to start."""
    found = last_checkpoint(job.out_dir / "checkpoints")
    chosen = mesh.gather_objects(found.name if found else None)[0]
    checkpoint = job.out_dir / "checkpoints" / chosen if chosen else None
    if checkpoint is not None and not checkpoint.is_dir():
        raise TraceForgeError(
            f"Rank 0 goes on from {checkpoint}, which this host does not see. The run folder must lie on a file "
            "system that all hosts share."
        )
    if mesh.rank == 0:
        step = int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0
        truncate_records(job.out_dir / "metrics.jsonl", step)
        if checkpoint:
            logger.info("Going on from the checkpoint of step %d.", step)
    return checkpoint


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in the folder. Only whole ones have their name."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return found[-1] if found else None


def write_training(
    job: Job, trainer: Any, start: dict[str, str], checkpoint: Path | None, held_out: dict[str, Any] | None
) -> None:
    """`training.json`: what this stage started from and ran on, for the comparison and for people."""
    arguments = trainer.args
    write_json(
        job.out_dir / "training.json",
        {
            "kind": job.kind,
            "start": start,
            "end": {"adapter": hash_adapter(job.out_dir / "adapter")},
            "dtype": job.config.model.dtype,
            "quantization": job.config.model.quantization,
            "device": job.device,
            "device_name": torch.cuda.get_device_name() if job.device == "cuda" else "cpu",
            "backend": job.backend,
            "trust_remote_code": job.config.model.trust_remote_code,
            "workers": job.workers,
            "branches": job.branches,
            "replicas": job.replicas,
            "transport": job.transport if job.workers > 1 else None,
            "resumed_from": checkpoint.name if checkpoint else None,
            "steps": trainer.state.global_step,
            "cut_to": job.cut_to,
            "held_out": held_out,
            "optimizer": {
                "name": str(getattr(arguments.optim, "value", arguments.optim)),
                "betas": [arguments.adam_beta1, arguments.adam_beta2],
                "epsilon": arguments.adam_epsilon,
                "weight_decay": arguments.weight_decay,
                "max_grad_norm": arguments.max_grad_norm,
            },
            "versions": json.loads(json.dumps(installed_versions())),
        },
    )
