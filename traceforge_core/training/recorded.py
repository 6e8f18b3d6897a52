"""What every trainer here adds to TRL's, as a mix-in: step log, checked and saved gradients, whole checkpoints.

    class SftTrainer(Recorded, SFTTrainer): ...

TRL and transformers keep the optimizer, schedule, clipping, accumulation, data order, checkpoint contents and resume.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from traceforge_core.errors import TraceForgeError
from traceforge_core.runs.progress import span
from traceforge_core.runs.stopping import StoppedByFile
from traceforge_core.training.records import StepRecord, append_record

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepTally:
    """Sums over the micro-batches of one optimizer step, as far as this worker computed them."""

    started: float = field(default_factory=time.perf_counter)
    micro_batches: int = 0
    loss: float = 0.0
    pairs: int = 0
    score_chosen: float = 0.0
    score_rejected: float = 0.0
    correct: float = 0.0
    tokens: int = 0
    exchange_seconds: float = 0.0
    peak_memory_mib: float = 0.0
    ids: list[list[str]] = field(default_factory=list)
    first_bad: int = -1
    data: str | None = None
    scored_tokens: int = 0
    weights_sketch: list[float] | None = None
    b_sketch: list[float] | None = None
    gradient_sketch: list[float] | None = None
    workers_apart: float | None = None


class Recorded:
    """Mix-in before a transformers Trainer. Set the attributes with `record_into` before training.

    A step's loss and gradients are checked where they are made: a NaN or inf raises TraceForgeError before it reaches
    a weight. Checkpoints appear under their name only when they are whole; one is kept.
    """

    out_dir: Path
    saved_gradient_steps: int = 0
    writes: bool = True
    beat: Callable[[str], None]
    stop_file: Path | None = None
    tally: StepTally | None = None
    _stop_asked: bool = False
    _checkpoint_scratch: Path | None = None
    _clock: float = 0.0
    _steps_done: int = 0

    def record_into(
        self,
        out_dir: Path,
        *,
        writes: bool,
        saved_gradient_steps: int,
        beat: Callable[[str], None],
        stop_file: Path | None = None,
    ) -> None:
        """Where to record. `writes`: this worker is the one that writes files. `beat`: called at every phase.
        `stop_file`: where it appears, the step at work is the last one."""
        self.out_dir, self.writes, self.beat, self.stop_file = out_dir, writes, beat, stop_file
        self.saved_gradient_steps = saved_gradient_steps

    # The step -----------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        tally = self.tally = self.tally or StepTally()
        step = self.state.global_step + 1  # type: ignore[attr-defined]
        tally.ids.append(list(inputs.get("pair_id", [])))
        tally.tokens += count_tokens(inputs)
        self.beat(f"at step {step}, micro-batch {tally.micro_batches + 1}")
        if self.computes(tally.micro_batches):
            loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
            tally.loss += loss.item()
            if tally.first_bad < 0 and not math.isfinite(gradient_norm(self.trained_parameters())):
                tally.first_bad = tally.micro_batches
        else:
            loss = torch.zeros((), device=self.args.device)  # type: ignore[attr-defined]
        tally.micro_batches += 1
        if self.accelerator.gradient_state.sync_gradients:  # type: ignore[attr-defined]
            self.beat(f"waiting at step {step} for the sum of gradients")
            loss = loss + self.finish_gradients(tally)
        return loss

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        self.beat("evaluating")  # a batch: many held-out samples may take longer than a worker may be silent
        return super().prediction_step(*args, **kwargs)  # type: ignore[misc]

    def computes(self, micro_batch: int) -> bool:
        """Whether this worker computes the step's micro-batch of that number."""
        return True

    def finish_gradients(self, tally: StepTally) -> float:
        """After the step's last backward: check the gradients, save them if asked. Returns what the step's loss lacks
        on this worker (nothing, for one worker)."""
        if not math.isfinite(tally.loss) or not math.isfinite(gradient_norm(self.trained_parameters())):
            self.raise_not_finite(tally, tally.first_bad)
        tally.peak_memory_mib = peak_memory_mib()
        self._stop_asked = self.sees_stop_file()
        self.save_gradients()
        return 0.0

    def sees_stop_file(self) -> bool:
        """Whether somebody wants the training to stop, as far as this worker sees."""
        return self.stop_file is not None and self.stop_file.exists()

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that are trained, in the model's order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]  # type: ignore[attr-defined]

    def raise_not_finite(self, tally: StepTally, micro_batch: int) -> None:
        """Stop the run, naming the pairs of that micro-batch (of the whole step where it is -1)."""
        step = self.state.global_step + 1  # type: ignore[attr-defined]
        found = tally.ids if micro_batch < 0 else [tally.ids[micro_batch]]
        names = ", ".join(name for ids in found for name in ids)
        where = f" (pair {names})" if names else ""
        raise TraceForgeError(
            f"The loss or a gradient is NaN or inf at step {step}{where}. No weight was changed by it. Look at that "
            "data; else lower the learning rate, or use float32 to see whether the precision is at fault."
        )

    def save_gradients(self) -> None:
        """Write the gradients of the first steps, summed and before clipping, by parameter name."""
        step = self.state.global_step + 1  # type: ignore[attr-defined]
        if not self.writes or step > self.saved_gradient_steps:
            return
        folder = self.out_dir / "gradients"
        folder.mkdir(exist_ok=True)
        # One that never came is zero, as in the sum over workers: it has to be seen, not left out.
        gradients = {
            name.replace(".default.", "."): (torch.zeros_like(p) if p.grad is None else p.grad.detach())
            .cpu()
            .contiguous()
            for name, p in self.model.named_parameters()  # type: ignore[attr-defined]
            if p.requires_grad
        }
        scratch = folder / "writing.tmp"
        save_file(gradients, scratch)
        scratch.rename(folder / f"step-{step:05d}.safetensors")

    # The record ---------------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, *args: Any, learning_rate: Any = None, **kwargs: Any
    ) -> None:
        """Called by transformers after every optimizer step (and once more at an epoch's end)."""
        if self.tally is not None:
            self._write_record(self.tally, grad_norm, learning_rate)
            self.tally = None
        state, control = self.state, self.control  # type: ignore[attr-defined]
        stops = self._stop_asked and state.global_step < state.max_steps
        control.should_save = control.should_save or stops
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, learning_rate=learning_rate, **kwargs)  # type: ignore[misc]
        if stops:
            self.callback_handler.on_train_end(self.args, state, control)  # type: ignore[attr-defined]  # trackers write
            raise StoppedByFile(
                f"stopped after step {state.global_step} of {state.max_steps}, with a checkpoint, because "
                f"{self.stop_file} is there."
            )

    def _write_record(self, tally: StepTally, grad_norm: Any, learning_rate: float | None) -> None:
        state = self.state  # type: ignore[attr-defined]
        seconds = time.perf_counter() - tally.started
        self._clock += seconds
        self._steps_done += 1
        self.beat(f"after step {state.global_step}")  # no longer waiting for others
        if not self.writes:
            return
        record = StepRecord(
            step=state.global_step,
            loss=tally.loss,
            grad_norm=float(grad_norm) if grad_norm is not None else None,
            total_steps=state.max_steps,
            learning_rate=learning_rate,
            seconds=seconds,
            tokens=tally.tokens,
            peak_memory_mib=tally.peak_memory_mib,
            exchange_seconds=tally.exchange_seconds,
        )
        if tally.pairs:
            record.score_chosen = tally.score_chosen / tally.pairs
            record.score_rejected = tally.score_rejected / tally.pairs
            record.margin = self.beta * (record.score_chosen - record.score_rejected)  # type: ignore[attr-defined]
            record.accuracy = tally.correct / tally.pairs
            record.data = tally.data
            record.scored_tokens = tally.scored_tokens
            record.weights_sketch = tally.weights_sketch
            record.b_sketch = tally.b_sketch
            record.gradient_sketch = tally.gradient_sketch
            record.workers_apart = tally.workers_apart
        append_record(self.out_dir / "metrics.jsonl", record)
        average = self._clock / self._steps_done
        left = average * (state.max_steps - state.global_step)
        logger.info(
            "step %d/%d  loss %.4f  %.2f s/step, %s left",
            state.global_step,
            state.max_steps,
            tally.loss,
            average,
            span(left),
        )

    # Checkpoints --------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """transformers' own checkpoint, written aside and renamed when it is whole; older ones are then removed."""
        if not self.writes:
            return
        self.beat("writing a checkpoint")
        home = Path(self.args.output_dir)  # type: ignore[attr-defined]
        self._checkpoint_scratch = home / "writing.tmp"
        remove_tree(self._checkpoint_scratch)  # what a killed attempt left
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            (written,) = self._checkpoint_scratch.glob("checkpoint-*")
            for file in written.rglob("*"):
                if file.is_file():
                    _to_disk(file)
            final = home / written.name
            remove_tree(final)
            written.rename(final)
        finally:
            remove_tree(self._checkpoint_scratch)
            self._checkpoint_scratch = None
        for old in home.glob("checkpoint-*"):
            if old != final:
                remove_tree(old)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._checkpoint_scratch or super()._get_output_dir(trial))  # type: ignore[misc]

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """None: TRL would write one at every checkpoint."""


def count_tokens(inputs: dict[str, Any]) -> int:
    """Tokens in a batch, padding left out, both branches counted."""
    masks = [
        inputs[name]
        for name in ("attention_mask", "chosen_attention_mask", "rejected_attention_mask")
        if name in inputs
    ]
    return sum(int(mask.sum()) for mask in masks)


def gradient_norm(parameters: list[torch.nn.Parameter]) -> float:
    """L2 norm of all gradients; NaN or inf where any is."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0


def peak_memory_mib() -> float:
    """Largest memory of this process so far: allocated on its GPU, or resident on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def remove_tree(folder: Path) -> None:
    """Remove a folder under another name first, so that nobody finds half of it."""
    import shutil

    if not folder.exists():
        return
    grave = folder.with_name(f".removing-{folder.name}")
    shutil.rmtree(grave, ignore_errors=True)
    folder.rename(grave)
    shutil.rmtree(grave, ignore_errors=True)


def _to_disk(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
