"""One forward and backward of a branch or pair: in tiles, behind a shared prefix, or in plain transformers and peft."""

from __future__ import annotations

from typing import Any

import torch
from one_gpu.measuring import GIB

PROMPT, COMPLETION = 77_824, 4_096


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1000, 150_000, (count,), generator=generator).cuda()


def branch_batch(prompt: int, completion: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = tokens(prompt + completion)[None]
    labels = ids.clone()
    labels[:, :prompt] = -100
    return ids, labels


def make_pair(prompt: int, completion: int) -> Any:
    from traceforge_core.longcontext.shared_prefix_attention import Pair

    every = torch.ones(completion, dtype=torch.bool, device="cuda")
    ids = tokens(prompt + completion)
    return Pair(ids[:prompt], ids[prompt:], tokens(completion, seed=1), every, every)


def simpo(score_chosen: torch.Tensor, score_rejected: torch.Tensor) -> torch.Tensor:
    return -torch.nn.functional.logsigmoid(2.0 * (score_chosen - score_rejected) - 0.5)


def tiled_branch(model: Any, prompt: int, completion: int) -> float:
    from traceforge_core.longcontext.enable import token_log_probs

    ids, labels = branch_batch(prompt, completion)
    log_probs, _ = token_log_probs(model, ids, None, labels)
    loss = simpo(log_probs.mean(), torch.tensor(-12.0, device="cuda"))
    loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.item()


def tiled_pair(model: Any, prompt: int, completion: int) -> float:
    from traceforge_core.longcontext.shared_prefix_attention import pair_log_probs

    log_probs, branch = pair_log_probs(model, [make_pair(prompt, completion)])
    loss = simpo(log_probs[branch == 0].mean(), log_probs[branch == 1].mean())
    loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.item()


def plain_branch(model: Any, prompt: int, completion: int, cudnn: bool = True) -> float:
    """One branch in transformers and peft: gradient checkpointing, logits of the completion only, no tiles."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    ids, labels = branch_batch(prompt, completion)
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION] if cudnn else [SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(backends, set_priority=True):
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=completion + 1).logits[0, :-1].float()
        log_probs = logits.log_softmax(-1).gather(-1, labels[0, prompt:, None])[:, 0]
        loss = simpo(log_probs.mean(), torch.tensor(-12.0, device="cuda"))
        loss.backward()
    model.zero_grad(set_to_none=True)
    return loss.item()


def enable(model: Any, **settings: Any) -> None:
    from traceforge_core.config import LongContextConfig
    from traceforge_core.longcontext.enable import enable_long_context

    enable_long_context(model, "on", LongContextConfig(**settings))


def disable(model: Any) -> None:
    from traceforge_core.config import LongContextConfig
    from traceforge_core.longcontext.enable import enable_long_context

    enable_long_context(model, "off", LongContextConfig())


def checkpointing(model: Any, on: bool) -> None:
    if on:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    else:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()


def host_gib() -> float:
    from traceforge_core.longcontext.host_store import pinned_bytes

    return pinned_bytes() / GIB


def warm(model: Any) -> None:
    """Kernels compiled, attention plans built, and pinned memory there, before anything is timed."""
    from traceforge_core.longcontext import host_store

    tiled_pair(model, 4096, 64)
    blocks = host_store._blocks
    missing = 24 * GIB - blocks.total
    while missing > 0:
        blocks.free += host_store._pinned_slab()
        blocks.total += GIB
        missing -= GIB
