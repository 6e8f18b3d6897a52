"""Supervised fine-tuning with TRL's SFTTrainer on samples that are tokens already, and a worker's way through it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from datasets.table import InMemoryTable
from transformers import PrinterCallback
from trl import SFTConfig, SFTTrainer

from traceforge_core.errors import TraceForgeError
from traceforge_core.longcontext.enable import enable_long_context
from traceforge_core.modeling.adapters import save_adapter
from traceforge_core.modeling.loading import load_model
from traceforge_core.training.agreement import checksum, tokenizer_hash
from traceforge_core.training.arguments import shared_arguments
from traceforge_core.training.job import Job
from traceforge_core.training.mesh import Mesh
from traceforge_core.training.preference import agree_on_checkpoint, evaluate, write_training
from traceforge_core.training.recorded import Recorded

logger = logging.getLogger(__name__)


class SftTrainer(Recorded, SFTTrainer):
    """TRL's SFTTrainer, made to record."""


def read_samples(path: Path) -> Dataset:
    """The SFT samples of a Parquet file: input_ids and labels (list of int; -100 where a token does not count).

    Raises TraceForgeError where there is none, or none with a token that counts.
    """
    try:
        table = pq.read_table(path, columns=["input_ids", "labels"])
    except (OSError, pa.ArrowInvalid) as error:
        raise TraceForgeError(f"Cannot read the SFT samples in {path}: {error}") from None
    if table.num_rows == 0:
        raise TraceForgeError(
            f"There are no SFT samples in {path}. The report of the datasets stage says why (outcomes, lengths)."
        )
    return Dataset(InMemoryTable(table))


def train(job: Job, mesh: Mesh, trainer_class: type[SftTrainer], beat: Callable[[str], None]) -> None:
    """Load, train (from the last checkpoint, if there is one), save. One worker."""
    samples = read_samples(job.data)
    held_out = read_samples(job.held_out) if job.held_out is not None else None
    beat("loading the model")
    model, tokenizer = load_model(
        job.model_dir,
        job.config.model,
        device=job.device,
        backend=job.backend,
        max_length=max(len(ids) for ids in samples["input_ids"]),
        adapter=job.adapter,
        seed=job.section.seed,
        gradient_checkpointing=job.section.gradient_checkpointing,
    )
    trainer = trainer_class(
        model=model,
        args=sft_arguments(job, mesh.rank),
        train_dataset=samples,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    enable_long_context(model, job.section.long_context, job.config.long_context)
    for parameter in trainer.trained_parameters():
        parameter.data = parameter.data.float()  # SFTTrainer makes a quantised model's adapter bfloat16
    trainer.record_into(job.out_dir, writes=True, saved_gradient_steps=0, beat=beat, stop_file=job.stop_file)
    start = {
        "adapter": checksum((name, p) for name, p in model.named_parameters() if p.requires_grad),
        "tokenizer": tokenizer_hash(tokenizer),
    }
    checkpoint = agree_on_checkpoint(job, mesh)
    before = evaluate(trainer, beat) if held_out is not None and checkpoint is None else None
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    after = evaluate(trainer, beat) if held_out is not None else None
    save_adapter(trainer.model, job.out_dir / "adapter")
    figures: dict[str, Any] | None = {"before": before, "after": after} if held_out is not None else None
    write_training(job, trainer, start, checkpoint, figures)


def sft_arguments(job: Job, rank: int) -> SFTConfig:
    """TRL's arguments for this job: no packing, nothing cut (samples have their length), nothing tokenised again."""
    return SFTConfig(
        **shared_arguments(job, rank),
        packing=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
