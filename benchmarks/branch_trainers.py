"""Trainers that only benchmarks/branch_parallel.py needs; workers load them by name."""

from __future__ import annotations

import os
from typing import Any

import torch

from traceforge_core.training.branch_parallel import BRANCHES, BranchParallelTrainer
from traceforge_core.training.pair_trainer import PairTrainer


class SwappedOracle(PairTrainer):
    """The oracle with the rejected branch first in its batch: equally right, rounded otherwise. Its difference from the
    oracle is the oracle's own noise."""

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> Any:
        if self.cpo_alpha:
            raise ValueError("TRL takes the NLL of what comes first, so branches cannot be swapped with cpo_alpha > 0")
        other = {"chosen": "rejected", "rejected": "chosen"}
        swapped = {
            name.replace(branch, other[branch]) if (branch := name.partition("_")[0]) in other else name: value
            for name, value in batch.items()
        }
        rejected, chosen, rejected_logits, chosen_logits, nll = super().concatenated_forward(model, swapped)[:5]
        return chosen, rejected, chosen_logits, rejected_logits, nll


class BothBranches(BranchParallelTrainer):
    """Both branches in turn on one worker: what Branch-Parallel halves."""

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> Any:
        (chosen, nll), (rejected, _) = (self.branch_scores(model, batch, branch) for branch in BRANCHES)
        self.require_finite_scores(batch, chosen, rejected)
        no_logits = torch.zeros(1, device=chosen.device)
        return chosen, rejected, no_logits, no_logits, nll


class CappedBranchParallel(BranchParallelTrainer):
    """Branch-Parallel on a GPU that pretends to have BENCHMARK_CAP_GIB of memory."""

    def __init__(self, **arguments: Any) -> None:
        if torch.cuda.is_available():
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(float(os.environ["BENCHMARK_CAP_GIB"]) * 2**30 / whole)
        super().__init__(**arguments)
