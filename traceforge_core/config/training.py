"""Sections of the trainings: `sft`, `preference`, `long_context`, `hosts`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from traceforge_core.config.fields import Positive, Section, Seed, Switch


class TrainingConfig(Section):
    """What SFT and preference training have in common."""

    epochs: float = Field(1.0, gt=0, description="Passes over the data; ignored where max_steps is set.")
    max_steps: Positive | None = Field(None, description="Optimizer steps; empty: as many as `epochs` needs.")
    batch_size: Positive = Field(1, description="Samples (or pairs) a forward pass.")
    gradient_accumulation: Positive = Field(1, description="Forward passes an optimizer step.")
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate.")
    schedule: Literal["linear", "cosine", "constant", "constant_with_warmup"] = Field(
        "cosine", description="Learning-rate schedule."
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(0, description="Steps over which the rate rises from zero.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    max_grad_norm: float = Field(1.0, ge=0, description="Gradients are clipped to this L2 norm; 0: never.")
    optimizer: Literal["adamw_torch", "adamw_8bit"] = Field(
        "adamw_torch", description="adamw_8bit needs CUDA and bitsandbytes."
    )
    gradient_checkpointing: bool = Field(True, description="Recompute activations in the backward to save memory.")
    long_context: Switch = Field(
        "auto",
        description="Tiled decoder layers with their inputs in host memory (section long_context). auto: on CUDA, for "
        "sequences of at least long_context.from_tokens. Exact, so nothing but time and memory changes.",
    )
    checkpoint_steps: Positive = Field(50, description="Save a checkpoint to resume from every so many steps.")
    report_to: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = Field(
        default_factory=list,
        description="Trackers to log to besides metrics.jsonl; each must be installed (there is an extra of its name). "
        "They write to trackers/ in the run's folder; wandb does so offline where there is no WANDB_API_KEY.",
    )
    seed: Seed = Field(0, description="Seed of data order and adapter initialisation.")
    evaluate: bool = Field(False, description="Evaluate on the held-out data before and after training.")
    hang_seconds: Positive = Field(
        1800, description="A worker that shows no progress for so long is taken to hang, and the stage is ended."
    )


class SftConfig(TrainingConfig):
    """Supervised fine-tuning with TRL's SFTTrainer."""


class PreferenceConfig(TrainingConfig):
    """SimPO, the same function for every strategy: L = -log σ(beta·(ā_chosen - ā_rejected) - simpo_gamma)."""

    learning_rate: float = Field(5e-6, gt=0, description="Peak learning rate.")
    start_from: Literal["sft", "base"] = Field(
        "sft", description="Begin from the SFT adapter, or a fresh one on the base model."
    )
    strategy: Literal["auto", "branch_parallel", "shared_prefix"] = Field(
        "branch_parallel",
        description="How the long-context stage computes a step. branch_parallel: chosen and rejected on two workers. "
        "shared_prefix: both branches in one sequence on one worker. auto: what the planner expects to be faster.",
    )
    beta: float = Field(2.0, gt=0, description="Scale β of the score difference.")
    simpo_gamma: float = Field(
        0.5, ge=0, description="Target margin γ, absolute as in TRL (SimPO's own configs give γ/β)."
    )
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="Share of labels assumed wrong.")
    cpo_alpha: float = Field(0.0, ge=0, description="Weight of the NLL term on the chosen branch; 0 is plain SimPO.")
    replicas: Positive = Field(
        1, description="Pairs in flight: branch_parallel uses 2 workers a replica, shared_prefix 1."
    )
    transport: Literal["auto", "nccl", "gloo"] = Field(
        "auto", description="auto: NCCL where each worker has its own GPU, else gloo."
    )
    share_gpu: bool = Field(
        False, description="Let workers share a GPU where there are too few: slow, over gloo; for trying things out."
    )


class LongContextConfig(Section):
    """How tiled decoder layers use memory. Nothing here changes what is computed, beyond rounding."""

    from_tokens: Positive = Field(16384, description="Shortest sequence that `long_context: auto` computes in tiles.")
    tile: Positive | None = Field(None, description="Tokens worked on at once; empty: what the free memory allows.")
    head_groups: Positive | None = Field(
        None, description="Parts in which KV heads are attended to, one after another; empty: by the free memory."
    )
    recompute: Literal["attention", "none"] = Field(
        "attention",
        description="attention: the backward computes attention again. none: its output waits in host memory instead, "
        "which is faster and takes twice the host memory.",
    )
    inputs_on_device: Annotated[int, Field(ge=0)] = Field(
        0, description="So many layers' inputs stay in GPU memory, to spare host memory."
    )
    logprob_chunk: Positive = Field(1024, description="Positions whose logits exist at once.")


class HostsConfig(Section):
    """Machines that share the workers of a long-context strategy. They must see the runs folder under the same path."""

    count: Positive = Field(1, description="How many, this one included. Each gets an equal part of the workers.")
    address: str | None = Field(
        None,
        pattern=r"^[^\s:/]+:\d+$",
        description="HOST:PORT of this machine where the others meet it; the log says what to start on them.",
    )

    @model_validator(mode="after")
    def _others_need_an_address(self) -> HostsConfig:
        if self.count > 1 and self.address is None:
            raise ValueError("hosts.count above 1 needs hosts.address, where the other machines meet this one")
        return self
