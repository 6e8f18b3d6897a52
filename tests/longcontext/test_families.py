"""Which models tiled layers take, told from config.json as from transformers' own configuration of it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from traceforge_core.longcontext.families import why_no_branches, why_no_shared_prefix, why_not_tiled, window_in


@pytest.mark.parametrize(
    ("written", "window"),
    [
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 7}, 7),
        ({"model_type": "llama", "sliding_window": 7}, None),
        ({"model_type": "qwen2", "sliding_window": 7}, None),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 3}, 7),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 4}, None),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0}, 4096),
        (
            {
                "model_type": "qwen3", "sliding_window": 9, "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            9,
        ),
    ],
)  # fmt: skip
def test_a_sliding_window_is_seen_before_anything_is_loaded(written: dict[str, Any], window: int | None) -> None:
    written = {"num_hidden_layers": 4} | written
    assert window_in(written) == window
    config = AutoConfig.for_model(**written)
    assert window_in(config) == window
    for form in (written, config):
        assert why_not_tiled(form) is None and why_no_branches(form) is None
        told = why_no_shared_prefix(form)
        assert told is None if window is None else f"({window} tokens)" in str(told)


def test_other_models_are_told_what_is_known() -> None:
    assert "this model's is qwen3_moe" in str(why_not_tiled({"model_type": "qwen3_moe"}))
    assert "this model's is unknown" in str(why_no_shared_prefix({}))
    assert "this model has gelu" in str(why_not_tiled({"model_type": "llama", "hidden_act": "gelu"}))
    assert "attention_dropout to 0" in str(why_not_tiled({"model_type": "llama", "attention_dropout": 0.1}))


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_a_rotation_that_depends_on_the_length_allows_no_branches(name: str, key: str) -> None:
    config = {"model_type": "llama", name: {key: "dynamic", "factor": 2.0}}
    assert why_not_tiled(config) is None
    assert "rope_type dynamic" in str(why_no_branches(config)) and why_no_shared_prefix(config) is not None
    assert why_no_branches({"model_type": "llama", name: {key: "yarn", "factor": 2.0}}) is None
