"""Sections of what is measured beside and after the trainings: `comparison`, `evaluation`, `monitoring`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from traceforge_core.config.fields import Positive, Section, Switch


class ComparisonConfig(Section):
    """How closely a strategy must agree with the oracle."""

    oracle_max_length: Annotated[int, Field(ge=16)] | None = Field(
        None,
        description="Longest branch the oracle can hold, in tokens: its full logits of a long pair fit on no GPU. With "
        "this set, oracle and strategy take `oracle_steps` steps on pairs cut to this length, which are compared; the "
        "strategy then trains on the whole pairs. Empty: both train on whole pairs, and those runs are compared.",
    )
    oracle_steps: Positive = Field(10, description="Optimizer steps on cut pairs; only with oracle_max_length.")
    gradient_steps: Annotated[int, Field(ge=0)] = Field(
        5, description="Optimizer steps whose gradients are saved and compared, from the first; 0: none."
    )
    loss_atol: float = Field(
        1e-6,
        gt=0,
        description="float32: largest loss difference at any step, for scores and losses up to 1; in proportion.",
    )
    gradient_rtol: float = Field(1e-5, gt=0, description="float32: largest relative L2 difference of any gradient.")
    adapter_rtol: float = Field(
        1e-5, gt=0, description="float32: largest relative L2 difference of the final adapters."
    )
    noise_runs: Annotated[int, Field(ge=0, le=12)] = Field(
        8,
        description="bfloat16: how often the oracle is run again, in ways that must not matter, to learn its own "
        "noise; 0: never, and the verdict stays undecided. Fewer than 4 say little.",
    )
    noise_steps: Positive = Field(
        6, description="Optimizer steps of each of these runs (in float32 of two that show what single gradients lose)."
    )
    confidence: float = Field(
        0.999, ge=0.9, lt=1, description="bfloat16: chance that a right strategy raises no alarm, over all tests."
    )
    exact: Switch = Field(
        "auto",
        description="bfloat16: compare in float32 too, on a few steps, where rounding hides nothing: the whole model "
        "where it is small, else its first two layers. auto: where memory allows.",
    )


class EvaluationConfig(Section):
    """What every model of a run is measured on: base, after SFT, after each preference strategy."""

    max_pairs: Annotated[int, Field(ge=0)] = Field(
        64, description="At most this many held-out pairs, spread evenly over them; 0: none."
    )
    max_actions: Annotated[int, Field(ge=0)] = Field(
        64, description="At most this many held-out next actions, spread evenly over them; 0: none."
    )


class MonitoringConfig(Section):
    """The monitor that runs beside training."""

    enabled: bool = Field(True, description="Sample GPUs (and host) while the flow runs.")
    interval_seconds: float = Field(2.0, gt=0, description="Time between samples.")
