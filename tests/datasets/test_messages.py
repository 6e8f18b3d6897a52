"""Messages at rest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceforge_core.datasets.messages import messages_from_json, messages_to_json, prompt_hash
from traceforge_core.trajectories.model import Action, Message

texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts, lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v)
)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=texts,
    reasoning=st.none() | texts,
    actions=st.lists(
        st.builds(
            Action,
            name=texts,
            arguments=st.dictionaries(texts, values, max_size=3),
            call_id=st.none() | texts,
            in_text=st.booleans(),
        ),
        max_size=2,
    ),
    call_id=st.none() | texts,
    returncode=st.none() | st.integers(-1, 255),
    trainable=st.booleans(),
)


@given(st.lists(messages, min_size=1, max_size=4))
def test_messages_come_back_as_they_were(messages: list[Message]) -> None:
    assert messages_from_json(messages_to_json(messages)) == messages


@given(messages)
def test_arguments_are_json_text_at_rest(message: Message) -> None:
    (entry,) = json.loads(messages_to_json([message]))
    for call, action in zip(entry.get("tool_calls", []), message.actions, strict=True):
        assert json.loads(call["function"]["arguments"]) == action.arguments


def test_the_usual_variants_are_understood() -> None:
    raw: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "assistant", "content": "lone \ud800 surrogate", "tool_calls": None, "function_call": None},
    ]
    system, call, text = messages_from_json(raw)
    assert (system.role, system.content) == ("system", "ab")
    assert (call.content, call.reasoning, call.actions) == ("", "r", [Action("f", {})])
    assert text.content == "lone � surrogate"


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ("[]", "at least one"),
        ("[1]", "message 0 is a int"),
        ('[{"role": "robot", "content": ""}]', "the role 'robot'"),
        ('[{"role": "user", "content": [{"image": "x"}]}]', "content that is not text"),
        ('[{"role": "assistant", "tool_calls": [{"id": "x"}]}]', "without function.name"),
        ('[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]', "not an object"),
        ('[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{torn"}}]}]', "Expecting"),
        ("{torn", "Expecting"),
    ],
)
def test_what_is_wrong_with_a_message_is_said(raw: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        messages_from_json(raw)


def test_a_prompt_hash_sees_what_the_model_sees_and_nothing_else() -> None:
    prompt = [Message("system", "s"), Message("user", "u")]
    same = [Message("system", "s"), Message("user", "u", call_id="x", returncode=0, trainable=False)]
    assert prompt_hash(prompt, []) == prompt_hash(same, [])
    assert prompt_hash(prompt, []) != prompt_hash([Message("system", "s"), Message("user", "u ")], [])
    assert prompt_hash(prompt, []) != prompt_hash(prompt, [{"name": "bash"}])
    assert prompt_hash(prompt, []) != prompt_hash([Message("user", "s"), Message("user", "u")], [])
