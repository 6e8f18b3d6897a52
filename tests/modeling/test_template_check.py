"""What a chat template loses is found without rendering anybody's data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.modeling.agent_run import CHATML_TOKENS
from traceforge_core.modeling.template_check import template_losses
from traceforge_core.modeling.template_choice import own_template


def test_arguments_encoded_twice_are_found(make_tokenizer: Callable[..., Any]) -> None:
    twice = own_template("chatml").replace(
        "(function.arguments or {}) | tojson", "(function.arguments | tojson) | tojson"
    )
    assert template_losses(make_tokenizer(twice, *CHATML_TOKENS)) == [
        "arguments of tool calls: quotes in them are encoded twice"
    ]
