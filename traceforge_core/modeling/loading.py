"""The model that a worker trains: base weights as the model stage prepared them, an adapter on top, and the tokenizer.

    model, tokenizer = load_model(model_dir, config.model, device="cuda", backend="transformers", max_length=81920,
                                  adapter=sft_adapter, seed=0, gradient_checkpointing=True)

The same call gives the same weights in every worker and with both backends: adapter parameters are float32, a fresh
adapter is drawn on the CPU from the seed, and rotary embeddings are the checkpoint's own whatever the length.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from traceforge_core.config import ModelConfig
from traceforge_core.errors import TraceForgeError

logger = logging.getLogger(__name__)


def load_model(
    model_dir: Path,
    config: ModelConfig,
    *,
    device: str,
    backend: str,
    max_length: int,
    adapter: Path | None,
    seed: int,
    gradient_checkpointing: bool,
) -> tuple[Any, Any]:
    """A trainable PeftModel and its tokenizer.

    model_dir: outputs of the model stage. max_length: tokens of the longest sequence that will come. adapter: folder of
    the adapter to go on from, None for a fresh one. Raises TraceForgeError where weights cannot be loaded.
    """
    weights, revision = weights_of(model_dir)
    prefer_cublaslt(config.cublaslt, device)
    tokenizer = AutoTokenizer.from_pretrained(model_dir / "tokenizer")
    if backend == "unsloth":
        model = _load_unsloth(weights, revision, config, max_length, adapter, seed, gradient_checkpointing)
    else:
        model = _load_transformers(weights, revision, config, device, adapter, seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            if "lora_" not in name:
                raise TraceForgeError(
                    f"{name} would be trained, but only adapter weights should be. Please report this."
                )
            parameter.data = parameter.data.float()
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    logger.info(
        "Loaded %s: %s, %s, %s trained parameters in float32, backend %s on %s.",
        weights, config.dtype, "NF4" if _is_quantized(model) else "not quantised", f"{trained:,}", backend, device,
    )  # fmt: skip
    return model, tokenizer


def weights_of(model_dir: Path) -> tuple[str, str | None]:
    """(path or hub id of the weights, revision) that the model stage recorded."""
    try:
        facts = json.loads((model_dir / "model.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TraceForgeError(
            f"{model_dir} is not the output of the model stage: {error}. Run the stage model again."
        ) from None
    beside = model_dir / facts["weights"]
    return (str(beside) if beside.is_dir() else facts["weights"]), facts.get("revision")


def prefer_cublaslt(wanted: str, device: str) -> None:
    """Prefer cuBLASLt for matrix products where asked to, or (auto) on compute capability 8.x.

    There bf16 products have failed with CUBLAS_STATUS_INVALID_VALUE (pytorch/pytorch#170676).
    """
    if device != "cuda" or wanted == "off":
        return
    major, minor = torch.cuda.get_device_capability()
    if wanted == "auto" and major != 8:
        return
    torch.backends.cuda.preferred_blas_library("cublaslt")
    reason = (
        "as configured" if wanted == "on" else f"compute capability {major}.{minor}, where cuBLAS has failed in bf16"
    )
    logger.info("Matrix products prefer cuBLASLt (%s).", reason)


def _load_transformers(
    weights: str, revision: str | None, config: ModelConfig, device: str, adapter: Path | None, seed: int
) -> Any:
    from peft import PeftModel, get_peft_model

    dtype = getattr(torch, config.dtype)
    try:
        own = AutoConfig.from_pretrained(weights, revision=revision, trust_remote_code=config.trust_remote_code)
        quantized = getattr(own, "quantization_config", None) is not None  # a ready bnb-4bit checkpoint
        options: dict[str, Any] = {}
        if config.quantization == "nf4" and not quantized:
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=dtype,
            )
        if device == "cuda":
            options["device_map"] = {"": 0}
        model = AutoModelForCausalLM.from_pretrained(
            weights,
            revision=revision,
            dtype=dtype,
            attn_implementation=config.attention,
            trust_remote_code=config.trust_remote_code,
            **options,
        )
    except (OSError, ValueError, ImportError) as error:
        raise TraceForgeError(f"Cannot load the model {weights}: {error}") from error
    model.config.use_cache = False
    if adapter is not None:
        return PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    model = get_peft_model(model, lora_config(config))
    draw_adapter(model, seed)
    return model


def _load_unsloth(
    weights: str,
    revision: str | None,
    config: ModelConfig,
    max_length: int,
    adapter: Path | None,
    seed: int,
    gradient_checkpointing: bool,
) -> Any:
    from unsloth import FastLanguageModel

    own = AutoConfig.from_pretrained(weights, revision=revision, trust_remote_code=config.trust_remote_code)
    native = own.max_position_embeddings
    # Asked for more than the checkpoint's own length, Unsloth silently scales the rotary embedding: another model.
    model, _ = FastLanguageModel.from_pretrained(
        model_name=weights,
        revision=revision,
        max_seq_length=min(max_length, native),
        dtype=getattr(torch, config.dtype),
        load_in_4bit=config.quantization == "nf4",
        trust_remote_code=config.trust_remote_code,
        device_map={"": 0},
    )
    if _rope(model.config) != _rope(own):
        raise TraceForgeError(
            f"Unsloth changed the rotary embedding from {_rope(own)} to {_rope(model.config)}, so it would train "
            "another model than the oracle. Set model.backend to transformers, and please report this."
        )
    model = FastLanguageModel.get_peft_model(
        model,
        r=config.lora.r,
        lora_alpha=config.lora.alpha,
        target_modules=config.lora.targets,
        lora_dropout=0.0,
        bias="none",
        use_gradient_checkpointing="unsloth" if gradient_checkpointing else False,
        random_state=seed,
        max_seq_length=max(max_length, native),
    )
    # Longer input is cut at this attribute with no more than a warning.
    for module in model.modules():
        if hasattr(module, "max_seq_length"):
            module.max_seq_length = max(max_length, native)
    # What Unsloth's own trainers do at the start of train(); ours are TRL's (see training/trl_original.py).
    FastLanguageModel.for_training(model, use_gradient_checkpointing="unsloth" if gradient_checkpointing else False)
    draw_adapter(model, seed)
    if adapter is not None:
        fill_adapter(model, adapter)
    return model


def lora_config(config: ModelConfig) -> Any:
    """The fresh adapter's shape. No dropout: strategies could not be compared with it."""
    from peft import LoraConfig

    return LoraConfig(
        r=config.lora.r,
        lora_alpha=config.lora.alpha,
        target_modules=list(config.lora.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def draw_adapter(model: Any, seed: int) -> None:
    """Fill a fresh adapter as PEFT does (A Kaiming-uniform, B zero), but on the CPU from `seed` and in the order of
    names, so that it is the same on any device and with any backend."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if ".lora_A." in name:
            drawn = torch.empty(parameter.shape, dtype=torch.float32)
            torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            parameter.data.copy_(drawn)
        elif ".lora_B." in name:
            parameter.data.zero_()


def fill_adapter(model: Any, adapter: Path) -> None:
    """Copy a saved adapter's weights into the model's own. Raises TraceForgeError where they do not fit."""
    from peft import set_peft_model_state_dict

    from traceforge_core.modeling.adapters import read_adapter

    result: Any = set_peft_model_state_dict(model, read_adapter(adapter))
    missing = [name for name in result.missing_keys if "lora_" in name]
    if missing or result.unexpected_keys:
        odd = (missing + list(result.unexpected_keys))[0]
        raise TraceForgeError(f"The adapter in {adapter} does not fit this model (first mismatch: {odd}).")


def _rope(config: Any) -> tuple[str, float, float | None]:
    """(kind of scaling, its factor, base) of a model's rotary embedding."""
    text = config.get_text_config()
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kind = found.get("rope_type", found.get("type", "default"))
    return kind, float(found.get("factor") or 1.0), found.get("rope_theta", getattr(text, "rope_theta", None))


def _is_quantized(model: Any) -> bool:
    return bool(
        getattr(model, "is_loaded_in_4bit", False) or getattr(model.get_base_model(), "is_loaded_in_4bit", False)
    )
