"""Qwen3-8B with random weights in NF4 and its LoRA adapter, as peft and as Unsloth load it."""

from __future__ import annotations

import functools
import gc
import os
import time
from pathlib import Path
from typing import Any

import torch
from one_gpu.measuring import GIB, record

WEIGHTS = Path("/dev/shm/qwen3-8b-random")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LAYERS = int(os.environ.get("LAYERS", "36"))  # fewer only to try the benchmark itself


def qwen3_8b(layers: int = 36) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960,
        rms_norm_eps=1e-6, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=151_643, eos_token_id=151_645,
    )  # fmt: skip


def make_weights(layers: int) -> Path:
    """Random bf16 weights on disk, once for each number of layers."""
    from transformers import AutoModelForCausalLM

    folder = WEIGHTS.with_name(f"{WEIGHTS.name}-{layers}")
    if not folder.exists():
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(qwen3_8b(layers), dtype=torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="4GB")
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return folder


def load(layers: int | None = None, adapter: bool = True) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    start = time.perf_counter()
    layers = layers or LAYERS
    folder = make_weights(layers)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=quantization, device_map={"": 0}, attn_implementation="sdpa"
    )
    model.config.use_cache = False
    if adapter:
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS, lora_dropout=0.0))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.01)
    record("model", f"{layers} layers", seconds=time.perf_counter() - start, gib=torch.cuda.memory_allocated() / GIB)
    return model.train()


@functools.cache
def shared_model() -> Any:
    """The whole model, loaded once for all sections of a process."""
    return load()


def load_unsloth() -> Any:
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        model_name=str(make_weights(LAYERS)), max_seq_length=40_960, dtype=torch.bfloat16, load_in_4bit=True,
        device_map={"": 0},
    )  # fmt: skip
    model = FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=16, target_modules=TARGETS, lora_dropout=0.0, bias="none",
        use_gradient_checkpointing="unsloth", max_seq_length=98_304,
    )  # fmt: skip
    for module in model.modules():
        if hasattr(module, "max_seq_length"):
            module.max_seq_length = 98_304
    return model
