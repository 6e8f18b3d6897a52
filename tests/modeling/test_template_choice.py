"""Which chat template a model gets, and what it is told where its own would lose something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.modeling.agent_run import CHATML_TOKENS, LLAMA_TOKENS, LOOK, RUN, SUBMIT, TOOLS, learned, like
from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.chat import ChatRenderer
from traceforge_core.modeling.template_check import template_losses
from traceforge_core.modeling.template_choice import choose_chat_template, own_template


def learned_text(tokenizer: Any) -> str:
    renderer = ChatRenderer(tokenizer)
    encoded = renderer.encode(RUN, TOOLS)
    return learned(renderer, encoded.input_ids, encoded.assistant_mask)


def refusal_of_its_own(tokenizer: Any) -> str:
    with pytest.raises(TraceForgeError) as refusal:
        choose_chat_template(tokenizer, "model")
    return str(refusal.value)


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("qwen25", ["reasoning: it is not rendered at all"]),
        ("qwen3", ["reasoning of every turn before the last user message (2 of 3"]),
        ("qwen3-2507-instruct", ["reasoning: it is not rendered at all"]),
        ("qwen3-2507-thinking", ["reasoning of every turn before the last user message (2 of 3"]),
        ("chatml_plain", ["reasoning: it is not rendered at all", "the definitions of the tools", "tool calls"]),
    ],
)
def test_a_chatml_model_whose_template_loses_something_gets_ours_or_a_refusal(
    make_tokenizer: Callable[..., Any], name: str, lost: list[str]
) -> None:
    tokenizer = make_tokenizer(like(name), *CHATML_TOKENS)
    refused = refusal_of_its_own(tokenizer)
    assert "model.chat_template=chatml" in refused
    assert all(line in refused for line in lost)
    assert choose_chat_template(tokenizer, "auto") == "chatml"
    assert learned_text(tokenizer) == LOOK + SUBMIT


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("llama3", ["reasoning: it is not rendered", "tool calls", "the definitions of the tools"]),
        ("llama31", ["reasoning: it is not rendered", "text beside a tool call"]),
    ],
)
def test_a_llama_model_gets_our_template_in_its_own_format(
    make_tokenizer: Callable[..., Any], name: str, lost: list[str]
) -> None:
    tokenizer = make_tokenizer(like(name), *LLAMA_TOKENS)
    refused = refusal_of_its_own(tokenizer)
    assert "model.chat_template=llama3" in refused
    assert all(line in refused for line in lost)
    with pytest.raises(TraceForgeError, match=r"needs <\|im_start\|> and <\|im_end\|> as single tokens"):
        choose_chat_template(tokenizer, "chatml")
    assert choose_chat_template(tokenizer, "auto") == "llama3"
    assert learned_text(tokenizer) == (LOOK + SUBMIT).replace("<|im_end|>", "<|eot_id|>")


def test_our_own_templates_lose_nothing(make_tokenizer: Callable[..., Any]) -> None:
    for name, tokens in (("chatml", CHATML_TOKENS), ("llama3", LLAMA_TOKENS)):
        tokenizer = make_tokenizer(own_template(name), *tokens)
        assert template_losses(tokenizer) == []
        assert choose_chat_template(tokenizer, "auto") == "model"
