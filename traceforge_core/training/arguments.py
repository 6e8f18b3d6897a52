"""The part of transformers' TrainingArguments that SFT and every preference strategy share, from one section."""

from __future__ import annotations

from typing import Any

from traceforge_core.training.job import Job
from traceforge_core.training.trackers import settle_trackers


def shared_arguments(job: Job, rank: int) -> dict[str, Any]:
    """Keyword arguments for SFTConfig or CPOConfig. Only rank 0 saves checkpoints and reports to trackers.

    `bf16` turns on autocast, as TRL does by default: adapters stay float32, products run in bfloat16, logits come back
    float32. With D replicas a step has D × gradient_accumulation micro-batches (see PairTrainer).
    """
    section = job.section
    replicas = 1 if job.kind == "sft" else job.config.preference.replicas  # the oracle has one worker, but equal steps
    goes_on = any((job.out_dir / "checkpoints").glob("checkpoint-*"))
    return {
        "output_dir": str(job.out_dir / "checkpoints"),
        "per_device_train_batch_size": section.batch_size,
        "per_device_eval_batch_size": section.batch_size,
        "gradient_accumulation_steps": section.gradient_accumulation * replicas,
        "num_train_epochs": section.epochs,
        "max_steps": section.max_steps or -1,
        "learning_rate": section.learning_rate,
        "lr_scheduler_type": section.schedule,
        "warmup_steps": section.warmup_steps,
        "weight_decay": section.weight_decay,
        "max_grad_norm": section.max_grad_norm,
        "optim": section.optimizer,
        # Unsloth's own checkpointing is switched on when its model is made; transformers' on top would undo it.
        "gradient_checkpointing": section.gradient_checkpointing and job.backend != "unsloth",
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "save_strategy": "steps" if rank == 0 else "no",
        "save_steps": section.checkpoint_steps,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # it would log a NaN loss as 0.0
        "report_to": list(section.report_to) if rank == 0 else [],
        "run_name": settle_trackers(job, goes_on=goes_on) if rank == 0 else job.label,
        "project": "traceforge",
        "disable_tqdm": True,
        "seed": section.seed,
        "data_seed": section.seed,
        "use_cpu": job.device == "cpu",
        "bf16": job.config.model.dtype == "bfloat16",
        "fp16": False,
        "dataloader_pin_memory": job.device == "cuda",
    }
