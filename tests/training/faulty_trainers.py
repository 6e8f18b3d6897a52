"""Trainers that go wrong on purpose, loaded by real workers (`Job.trainer` = "faulty_trainers:Name").

Which rank, step or pair is read from the environment, so that one class serves several tests.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from traceforge_core.training.branch_parallel import BranchParallelTrainer
from traceforge_core.training.pair_trainer import PairTrainer
from traceforge_core.training.sft import SftTrainer
from traceforge_core.training.shared_prefix import SharedPrefixTrainer

RANK = int(os.environ.get("TRACEFORGE_RANK", "0"))
FAULTY_RANK = int(os.environ.get("FAULTY_RANK", "1"))
FAULTY_STEP = int(os.environ.get("FAULTY_STEP", "3"))
FAULTY_PAIR = os.environ.get("FAULTY_PAIR", "")


class _Faulty:
    """Calls `fault` in the named step, on the named rank, before its micro-batch."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if RANK == FAULTY_RANK and self.state.global_step + 1 == FAULTY_STEP:  # type: ignore[attr-defined]
            self.fault()
        return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def fault(self) -> None:
        raise NotImplementedError


class _Killed(_Faulty):
    def fault(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Killed(_Killed, BranchParallelTrainer): ...


class KilledOracle(_Killed, PairTrainer): ...


class KilledSft(_Killed, SftTrainer): ...


class KilledShared(_Killed, SharedPrefixTrainer): ...


class Hangs(_Faulty, BranchParallelTrainer):
    def fault(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a worker stuck in a driver does not react either
        time.sleep(3600)


class OutOfMemory(_Faulty, BranchParallelTrainer):
    def fault(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class Drifts(_Faulty, BranchParallelTrainer):
    def fault(self) -> None:
        self.trained_parameters()[0].data.add_(0.01)


class RaisesInBackward(_Faulty, BranchParallelTrainer):
    def fault(self) -> None:
        def raise_here(gradient: torch.Tensor) -> None:
            raise RuntimeError("the backward broke")

        self.trained_parameters()[-1].register_hook(raise_here)


class Slow(BranchParallelTrainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(0.5)
        return super().training_step(*args, **kwargs)


class NanScore(BranchParallelTrainer):
    """The rejected branch's score of one pair is NaN."""

    def branch_scores(self, model: Any, batch: dict[str, Any], branch: str) -> tuple[torch.Tensor, torch.Tensor]:
        scores, nll = super().branch_scores(model, batch, branch)
        bad = torch.tensor([RANK == FAULTY_RANK and name == FAULTY_PAIR for name in batch["pair_id"]])
        return scores.masked_fill(bad, float("nan")), nll


class InfiniteGradient(BranchParallelTrainer):
    """One pair's backward gives an infinite gradient on one rank, though its score is fine."""

    def branch_scores(self, model: Any, batch: dict[str, Any], branch: str) -> tuple[torch.Tensor, torch.Tensor]:
        scores, nll = super().branch_scores(model, batch, branch)
        if RANK == FAULTY_RANK and FAULTY_PAIR in batch["pair_id"]:
            scores.register_hook(lambda gradient: gradient * float("inf"))
        return scores, nll


class _Other(BranchParallelTrainer):
    """Starts from something else on the faulty rank."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if RANK == FAULTY_RANK:
            self.change()

    def change(self) -> None:
        raise NotImplementedError


class OtherBaseWeights(_Other):
    def change(self) -> None:
        weight = self.model.get_base_model().lm_head.weight
        weight.data.view(torch.int32)[3, 5] ^= 1  # one bit


class OtherDataOrder(_Other):
    def change(self) -> None:
        self.args.data_seed += 1


class OtherTokenizer(_Other):
    def change(self) -> None:
        self.processing_class.chat_template = "{{ messages }}"


class OtherAdapter(_Other):
    def change(self) -> None:
        self.trained_parameters()[0].data.add_(1.0)
