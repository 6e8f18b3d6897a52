"""The ChatML template: what Qwen3 writes, nothing lost, and the same text for a turn wherever it stands."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from traceforge_core.modeling.tiny import CHATML

TEMPLATE = CHATML.read_text(encoding="utf-8")
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    return render_jinja_template(conversations=[messages], chat_template=TEMPLATE, **options)[0][0]


def call(arguments: Any, name: str = "bash") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_whole_run_renders_as_qwen3_writes_it() -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A", "reasoning_content": "R", "tool_calls": [call({"command": "ls <x> é"})]},
        {"role": "tool", "content": "T1"},
        {"role": "tool", "content": "T2"},
        {"role": "assistant", "content": None, "tool_calls": [call({}), call({"n": 1})]},
    ]
    schema = '{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}'
    assert render(messages, tools=[BASH], add_generation_prompt=True) == (
        "<|im_start|>system\nS\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        f"{schema}\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\nU<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nR\n</think>\n\nA\n<tool_call>\n"
        '{"name": "bash", "arguments": {"command": "ls <x> é"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nT1\n</tool_response>\n<tool_response>\nT2\n</tool_response><|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"name": "bash", "arguments": {"n": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_reasoning_stays_in_turns_before_a_later_user_message() -> None:
    messages = [
        {"role": "user", "content": "U1"},
        {"role": "assistant", "content": "A1", "reasoning_content": "first thoughts"},
        {"role": "user", "content": "format error"},
        {"role": "assistant", "content": "A2", "reasoning_content": "second thoughts"},
    ]
    text = render(messages)
    assert "<think>\nfirst thoughts\n</think>\n\nA1<|im_end|>" in text
    assert "<think>\nsecond thoughts\n</think>\n\nA2<|im_end|>" in text


def test_arguments_as_an_object_and_as_json_text_render_the_same_and_once() -> None:
    as_object = render([{"role": "assistant", "content": "", "tool_calls": [call({"command": 'echo "a\nb"'})]}])
    as_text = render([{"role": "assistant", "content": "", "tool_calls": [call('{"command": "echo \\"a\\nb\\""}')]}])
    assert as_object == as_text
    assert as_object.count("echo") == 1 and '\\\\"' not in as_object


def test_parts_of_text_are_joined_and_other_parts_refused() -> None:
    text = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert render([{"role": "user", "content": text}]) == "<|im_start|>user\none two<|im_end|>\n"
    with pytest.raises(TemplateError, match="renders text only"):
        render([{"role": "user", "content": [{"type": "image", "url": "x"}]}])


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(TemplateError, match="not exit"):
        render([{"role": "exit", "content": "patch"}])


words = st.text(alphabet="ab \n<>{}\"'\\é", max_size=12)
turns = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, words),
    st.builds(lambda text: {"role": "tool", "content": text}, words),
    st.builds(
        lambda text, thought, calls: {
            "role": "assistant",
            "content": text,
            **({"reasoning_content": thought} if thought else {}),
            "tool_calls": [call({"command": command}) for command in calls],
        },
        words,
        words,
        st.lists(words, max_size=2),
    ),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(turns, min_size=1, max_size=7), st.booleans(), st.booleans())
def test_a_prompt_is_the_beginning_of_what_follows_and_marks_are_the_rest(
    messages: list[dict[str, Any]], with_system: bool, with_tools: bool
) -> None:
    if with_system:
        messages = [{"role": "system", "content": "S"}, *messages]
    tools = [BASH] if with_tools else None
    texts, spans = render_jinja_template(
        conversations=[messages], chat_template=TEMPLATE, tools=tools, return_assistant_tokens_mask=True
    )
    marked = iter(spans[0])
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:position], tools=tools, add_generation_prompt=True)
        through = render(messages[: position + 1], tools=tools)
        start, end = next(marked)
        assert through.startswith(prompt) and texts[0].startswith(through)
        assert (start, end + 1) == (len(prompt), len(through))
        assert texts[0][:end].endswith("<|im_end|>") and texts[0][end] == "\n"
    assert next(marked, None) is None
