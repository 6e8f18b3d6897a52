"""Section `model`: what is trained, and on what."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from traceforge_core.config.fields import Positive, Section, Switch


class LoraConfig(Section):
    """The adapter that is trained."""

    r: Positive = Field(16, description="Rank.")
    alpha: Positive = Field(16, description="Scaling: the update is multiplied by alpha / r.")
    targets: list[str] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        min_length=1,
        description="Names of the linear layers that get an adapter.",
    )


class ModelConfig(Section):
    """The model that is trained."""

    name: str = Field(
        "tiny",
        min_length=1,
        description="tiny: a small Qwen3 built on the spot, no download. Else a local folder or a hub id "
        "(Qwen/Qwen3-8B, a bnb-4bit checkpoint, ...).",
    )
    revision: str | None = Field(None, description="Hub revision (commit, tag or branch); empty: the default branch.")
    backend: Literal["auto", "transformers", "unsloth"] = Field(
        "auto",
        description="auto: unsloth on CUDA where it is installed, else transformers. The oracle never uses unsloth.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where models are trained. auto: CUDA where there is a GPU, else the CPU."
    )
    quantization: Literal["none", "nf4"] = Field(
        "none", description="nf4: 4-bit base weights (needs CUDA and bitsandbytes)."
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Compute type of the base model.")
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="Attention implementation in transformers.")
    chat_template: Literal["auto", "model", "chatml", "llama3"] = Field(
        "auto",
        description="model: the tokenizer's own. chatml, llama3: TraceForge's (keep all reasoning and calls, mark the "
        "model's tokens), for tokenizers with <|im_start|> or <|start_header_id|>. auto: the tokenizer's own where it "
        "loses nothing, else the one of ours that fits.",
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the model. Off unless you trust it."
    )
    cublaslt: Switch = Field(
        "auto",
        description="Prefer cuBLASLt for matrix products: works around CUBLAS_STATUS_INVALID_VALUE, seen in bf16 GEMMs "
        "on Ampere cards. auto: on for compute capability 8.x.",
    )
    lora: LoraConfig = Field(default_factory=LoraConfig, description="The adapter that is trained.")
