"""The oracle in ways that must not matter: the other branch first, more padding, one row at a time, other kernels.

    trainer_class = vary(PairTrainer, VARIANTS["rejected first, eager attention"], last_step=8)

In exact arithmetic all of them give TRL's scores and gradients. In bfloat16 they do not, and by how much they differ is
the noise that a strategy's difference has to be judged against (noise_floor.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import TrainerCallback

from traceforge_core.training.pairs import IGNORED

BRANCHES = ("chosen", "rejected")
KERNELS = {
    "math": [SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
}


@dataclass(frozen=True, slots=True)
class Variant:
    """swap: the rejected branch comes first in the batch. single: one row at a time, without padding. left, right:
    padding tokens added on that side. attention: "sdpa", "eager", or one of KERNELS (through SDPA)."""

    swap: bool = False
    single: bool = False
    left: int = 0
    right: int = 0
    attention: str = "sdpa"


# From one thing changed to several; the first K are used. A kernel that a device lacks falls back to the plain one.
VARIANTS: dict[str, Variant] = {
    "one row at a time": Variant(single=True),
    "eager attention": Variant(attention="eager"),
    "rejected first, 7 tokens of padding before": Variant(left=7, swap=True),
    "one row at a time, another kernel": Variant(single=True, attention="math"),
    "one row at a time, 3 tokens of padding before": Variant(single=True, left=3),
    "rejected first, another kernel, 33 tokens of padding behind": Variant(swap=True, attention="efficient", right=33),
    "eager attention, 9 tokens of padding before": Variant(left=9, attention="eager"),
    "one row at a time, eager attention, 12 tokens of padding before": Variant(single=True, attention="eager", left=12),
    "31 tokens of padding before": Variant(left=31),
    "one row at a time, 64 tokens of padding behind": Variant(single=True, right=64),
    "rejected first, eager attention, 5 tokens of padding before": Variant(swap=True, attention="eager", left=5),
    "one row at a time, another kernel, 21 tokens of padding before": Variant(single=True, left=21, attention="math"),
    "rejected first, 17 tokens of padding before": Variant(swap=True, left=17),
    "one row at a time, cuDNN attention": Variant(single=True, attention="cudnn"),
    "one row at a time, memory-efficient attention": Variant(single=True, attention="efficient"),
    "one row at a time, 11 tokens of padding before": Variant(single=True, left=11),
    "2 tokens of padding before": Variant(left=2),
    "rejected first, 13 tokens of padding before": Variant(swap=True, left=13),
}
QUADRATIC = ("eager", "math")
"""Kernels that hold all scores of a head at once."""
AGAIN = "the same again"
"""The oracle a second time, changed in nothing: must differ by nothing, or by what the device leaves to chance."""


def usable(count: int, longest: int, device: str) -> list[str]:
    """The first `count` variants that can be run on sequences of that length, by name."""
    short = longest <= (4096 if device == "cuda" else 16384)
    return [name for name, variant in VARIANTS.items() if short or variant.attention not in QUADRATIC][:count]


def vary(trainer: Any, variant: Variant, last_step: int) -> Any:
    """The oracle's trainer class, computing in that way and ending after `last_step` (with the whole run's
    schedule)."""

    class Varied(trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(_EndAfter(last_step))
            if variant.attention == "eager":
                self.model.set_attn_implementation("eager")

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with _kernel(variant.attention):  # the backward, which may recompute the forward, included
                return super().training_step(*args, **kwargs)

        def concatenated_forward(self, model: Any, batch: Any) -> Any:
            swap = variant.swap and self.cpo_alpha == 0  # the NLL term is of the branch that comes first
            batch = _turned(batch) if swap else batch
            batch = _padded(batch, variant.left, variant.right, self.pad_token_id)
            forward = self._one_by_one if variant.single else super().concatenated_forward
            chosen, rejected, *rest = forward(model, batch)
            return (rejected, chosen, *rest) if swap else (chosen, rejected, *rest)

        def _one_by_one(self, model: Any, batch: Any) -> Any:
            scores: dict[str, torch.Tensor] = {}
            for branch in BRANCHES:
                ids, mask, labels = (batch[f"{branch}_{name}"] for name in ("input_ids", "attention_mask", "labels"))
                self.note_scored(labels[:, 1:] != IGNORED)
                rows = []
                for row in range(len(ids)):
                    end = ids.shape[1] if variant.right else int(mask[row].nonzero().max()) + 1
                    logits = model(ids[row : row + 1, :end], attention_mask=mask[row : row + 1, :end], use_cache=False)
                    rows.append(self.get_batch_logps(logits.logits, labels[row : row + 1, :end], average_log_prob=True))
                scores[branch] = torch.cat(rows)
            nothing = torch.zeros(1, device=scores["chosen"].device)
            tokens = (batch["chosen_labels"][:, 1:] != IGNORED).sum(-1)
            nll = -(scores["chosen"] * tokens).sum() / tokens.sum() if self.cpo_alpha > 0 else nothing[0]
            return scores["chosen"], scores["rejected"], nothing, nothing, nll

    Varied.__name__ = Varied.__qualname__ = trainer.__name__
    return Varied


def _turned(batch: dict[str, Any]) -> dict[str, Any]:
    other = {"chosen": "rejected", "rejected": "chosen"}
    return {
        (other[branch] + name[len(branch) :] if (branch := name.split("_")[0]) in other else name): value
        for name, value in batch.items()
    }


def _padded(batch: dict[str, Any], left: int, right: int, pad: int) -> dict[str, Any]:
    """Both branches with that many tokens more on each side. Rotary positions are relative, so a shift is nothing."""
    if not (left or right):
        return batch
    padded = dict(batch)
    for branch in BRANCHES:
        for name, value in (("input_ids", pad), ("attention_mask", 0), ("labels", IGNORED)):
            padded[f"{branch}_{name}"] = torch.nn.functional.pad(batch[f"{branch}_{name}"], (left, right), value=value)
    return padded


@contextlib.contextmanager
def _kernel(attention: str) -> Iterator[None]:
    if attention in KERNELS:
        with sdpa_kernel(KERNELS[attention], set_priority=True):
            yield
    else:
        yield


class _EndAfter(TrainerCallback):
    def __init__(self, last_step: int) -> None:
        self._last_step = last_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= self._last_step:
            control.should_training_stop = True
