"""Before the first step: have all workers the same weights, adapter, tokenizer, data in the same order, and settings?

Checksums of weights are computed where the weights lie (integer sums over their bits), so that 8B parameters on a GPU
take a fraction of a second.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch

from traceforge_core.errors import TraceForgeError
from traceforge_core.training.job import Job
from traceforge_core.training.mesh import Mesh

CHUNK = 1 << 22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_checksum(tensor: torch.Tensor) -> tuple[int, int]:
    """Two integers that change when a bit changes or values change places: the sum of the values' bits read as
    integers, and their sum weighted by position (both modulo 2^64, so the order of summation does not matter)."""
    bits = tensor.detach().contiguous().reshape(-1).view(_BITS[tensor.element_size()])
    plain = weighted = 0
    for start in range(0, bits.numel(), CHUNK):
        chunk = bits[start : start + CHUNK].to(torch.int64)
        weights = torch.arange(chunk.numel(), device=chunk.device) % 8191 + 1 + start % 8191
        plain += int(chunk.sum())
        weighted += int((chunk * weights).sum())
    return plain % 2**64, weighted % 2**64


def checksum(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """One hash over named tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor_checksum(tensor)}\n".encode())
    return digest.hexdigest()


def fingerprints(trainer: Any, job: Job) -> dict[str, str]:
    """What must be equal on all workers, the adapter's values left out, by the name that a person knows it by."""
    named = list(trainer.model.named_parameters())
    sampler = trainer._get_train_sampler()
    order = repr((type(sampler).__name__, len(trainer.train_dataset), trainer.args.data_seed)).encode()
    settings = job.config.model_dump(mode="json")
    return {
        "base weights": checksum((name, tensor) for name, tensor in named if not tensor.requires_grad),
        "adapter's shape": repr([(name, tuple(t.shape), t.dtype) for name, t in named if t.requires_grad]),
        "tokenizer": tokenizer_hash(trainer.processing_class),
        "data order": hashlib.sha256(order + trainer.train_dataset.fingerprint().encode()).hexdigest(),
        "config": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
    }


def agree_on_start(mesh: Mesh, trainer: Any, job: Job) -> dict[str, str]:
    """Give every worker the adapter of rank 0, and compare what must be equal then. Returns the checksums.

    Shapes and settings are compared first: adapters of different shapes cannot be sent, and gloo's error would not say
    why. Raises TraceForgeError, on every worker, naming what differs and on which workers.
    """
    start = fingerprints(trainer, job)
    require_agreement(mesh, start, job)
    del start["adapter's shape"]
    mesh.broadcast(trainer.trained_parameters())
    start["adapter"] = checksum((name, t) for name, t in trainer.model.named_parameters() if t.requires_grad)
    require_agreement(mesh, start, job)
    return start


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of the vocabulary, the special tokens and the chat template."""
    parts = (sorted(tokenizer.get_vocab().items()), sorted(tokenizer.all_special_tokens), tokenizer.chat_template)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def require_agreement(mesh: Mesh, own: dict[str, str], job: Job) -> None:
    """Raises TraceForgeError, on every worker, naming what differs and on which workers."""
    everyone = mesh.gather_objects(own)
    lines = []
    for what in own:
        apart = [rank for rank, theirs in enumerate(everyone) if theirs[what] != everyone[0][what]]
        if apart:
            lines.append(f"  {what}: differs from rank 0 on {', '.join(job.describe(rank) for rank in apart)}")
    if lines:
        raise TraceForgeError(
            "The workers do not start from the same state, so their gradients must not be summed:\n"
            + "\n".join(lines)
            + "\nOn several hosts, make sure that all have the same model, data, code and configuration."
        )
