"""Tiny models of every supported family with random LoRA adapters, in any dtype, and the plain path to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

VOCABULARY = 97
ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "attn_implementation": "sdpa",
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(
        **SHAPE,
        head_dim=8,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    ),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**SHAPE, sliding_window=7),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16),
}  # fmt: skip


def tiny(family: str, dtype: torch.dtype = torch.float64, targets: tuple[str, ...] = ALL_TARGETS, rank: int = 4) -> Any:
    torch.manual_seed(hash(family) % 1000)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]()).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data.uniform_(0.5, 1.5)
        elif parameter.ndim == 2:
            parameter.data.mul_(4)  # far from linear, so that a wrong derivative shows
    model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=6, target_modules=list(targets), lora_dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
            if "lora_B" in name:
                parameter.data.normal_(0, 0.1)
    return model.train()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], relative: float) -> None:
    """Each gradient within `relative` in L2 norm. One that is zero but for rounding (the query of a token that sees one
    key) is measured against 1e-4."""
    assert one.keys() == other.keys() and one
    for name, value in one.items():
        distance = float((value - other[name]).norm() / max(float(other[name].norm()), 1e-4))
        assert distance <= relative, f"{name}: {distance:.3g}"


@pytest.fixture
def wide_norms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers takes RMSNorm in float32 even for a float64 model: lift that, or nothing agrees beyond 1e-7."""
    from transformers.models.llama import modeling_llama
    from transformers.models.mistral import modeling_mistral
    from transformers.models.qwen2 import modeling_qwen2
    from transformers.models.qwen3 import modeling_qwen3

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (hidden_states * scale)

    for module, name in (
        (modeling_llama, "LlamaRMSNorm"), (modeling_mistral, "MistralRMSNorm"),
        (modeling_qwen2, "Qwen2RMSNorm"), (modeling_qwen3, "Qwen3RMSNorm"),
    ):  # fmt: skip
        monkeypatch.setattr(getattr(module, name), "forward", forward)
    return
