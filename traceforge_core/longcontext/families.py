"""Which models tiled layers compute, and which of those can share a prefix, from a model's configuration alone.

    reason = why_not_tiled(config)           # None where they can; config.json as a dict, or a transformers config
    reason = why_no_shared_prefix(config)

Imports no torch, so that a plan and a flow can refuse before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROTATIONS_BY_LENGTH = ("dynamic", "longrope")


def why_not_tiled(config: Any) -> str | None:
    """Why tiled layers cannot compute this model, in sentences, or None."""
    family = field(config, "model_type", "unknown")
    if family not in FAMILIES:
        return (
            f"Tiled layers know the families {', '.join(FAMILIES)}; this model's is {family}. Set long_context to off."
        )
    activation = field(config, "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        return f"Tiled layers know silu MLPs; this model has {activation}. Set long_context to off."
    if field(config, "attention_dropout", 0.0):
        return "Tiled layers need attention dropout off. Set attention_dropout to 0 in the config.json."
    return None


def why_no_branches(config: Any) -> str | None:
    """Why a branch of this model cannot be computed by itself: some rotary embeddings turn by the length of the longest
    sequence so far, so that each branch would see another model than the oracle, which pads both to one length."""
    kind = _rotation(config)
    if kind in ROTATIONS_BY_LENGTH:
        return (
            f"This model's rotary embedding depends on the sequence's length (rope_type {kind}), so that a branch by "
            "itself is not what the oracle computes. Set a rope_type that does not (default, linear, yarn, llama3) in "
            "its config.json."
        )
    return None


def why_no_shared_prefix(config: Any) -> str | None:
    """Why both branches of a pair cannot be one sequence for this model, in sentences, or None."""
    if reason := why_no_branches(config) or why_not_tiled(config):
        return reason
    window = window_in(config)
    if window is not None:
        return (
            f"A shared prefix needs full attention, and this model's layers look back over a sliding window only "
            f"({window} tokens). Use strategy branch_parallel."
        )
    return None


def window_in(config: Any) -> int | None:
    """The sliding window of any of the model's layers, or None where all see everything before."""
    if field(config, "model_type") == "mistral":
        # transformers' default where config.json has no such line; null there means none.
        window: int | None = (
            config.get("sliding_window", 4096) if isinstance(config, Mapping) else config.sliding_window
        )
        return window
    kinds = field(config, "layer_types")
    if kinds is None and field(config, "use_sliding_window", False):
        slides = field(config, "num_hidden_layers", 0) > field(config, "max_window_layers", 28)
        kinds = ["sliding_attention"] if slides else []
    return field(config, "sliding_window", 4096) if "sliding_attention" in (kinds or []) else None


def _rotation(config: Any) -> str:
    rope = field(config, "rope_parameters") or field(config, "rope_scaling") or {}
    kind: str = rope.get("rope_type", rope.get("type", "default"))
    return kind


def field(config: Any, name: str, default: Any = None) -> Any:
    """A field of a config.json (as a dict) or of a transformers config; what is null counts as absent."""
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if value is None else value
