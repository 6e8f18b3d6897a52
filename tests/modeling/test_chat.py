"""What the model sees and what it must produce, with our template and with templates like those of public models."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.modeling.agent_run import CHATML_TOKENS, LLAMA_TOKENS, LOOK, RUN, SUBMIT, TOOLS, learned, like
from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.chat import ChatRenderer, load_renderer
from traceforge_core.modeling.messages import RenderingError, check_nothing_lost
from traceforge_core.modeling.template_check import template_losses
from traceforge_core.modeling.template_choice import own_template
from traceforge_core.trajectories.model import Action, Message


@pytest.fixture(scope="module")
def renderer(chat_tokenizer: Any) -> ChatRenderer:
    return ChatRenderer(chat_tokenizer)


def test_the_mask_covers_exactly_the_trainable_turns_with_their_end(renderer: ChatRenderer) -> None:
    encoded = renderer.encode(RUN, TOOLS)
    assert learned(renderer, encoded.input_ids, encoded.assistant_mask) == LOOK + SUBMIT
    assert renderer.tokenizer.decode(encoded.input_ids) == encoded.text


def test_turn_spans_point_at_each_turn_trainable_or_not(renderer: ChatRenderer) -> None:
    encoded = renderer.encode(RUN, TOOLS)
    texts = [encoded.text[turn.text_start : turn.text_end] for turn in encoded.turns]
    assert texts == [LOOK, "No call here.<|im_end|>", SUBMIT]
    assert [renderer.tokenizer.decode(encoded.input_ids[turn.start : turn.end]) for turn in encoded.turns] == texts


def test_a_completion_ends_at_the_end_of_turn_and_its_observations_do_not_count(renderer: ChatRenderer) -> None:
    encoded = renderer.encode_completion(RUN[:2], RUN[2:], TOOLS)
    assert encoded.completion_ids[-1] == renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert learned(renderer, encoded.completion_ids, encoded.completion_mask) == LOOK + SUBMIT
    assert renderer.tokenizer.decode(encoded.prompt_ids) == encoded.prompt_text
    assert renderer.tokenizer.decode(encoded.completion_ids) == encoded.completion_text


def test_prompt_and_completion_are_the_whole_conversation_cut_in_two(renderer: ChatRenderer) -> None:
    whole = renderer.encode(RUN, TOOLS)
    parts = renderer.encode_completion(RUN[:4], RUN[4:], TOOLS)
    end = whole.turns[-1].end
    assert [*parts.prompt_ids, *parts.completion_ids] == whole.input_ids[:end].tolist()


def test_an_action_read_out_of_the_text_is_not_written_twice(renderer: ChatRenderer) -> None:
    text = "I list.\n\n```bash\nls -la\n```"
    turn = Message("assistant", text, actions=[Action("bash", {"command": "ls -la"}, in_text=True)])
    assert renderer.encode_completion([Message("user", "go")], [turn]).completion_text == text + "<|im_end|>"


texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=30) | st.sampled_from(
    [
        "",
        "\n",
        " x\n",
        "<|im_end|>",
        "a <|im_end|>\n<|im_start|>assistant\nb",
        "\n\nx",
        "  ",
        "</think>",
        "é\r\n",
        '"{',
    ],
)
arguments = st.dictionaries(st.sampled_from(["command", "path"]), texts, max_size=2)
actions = st.lists(st.builds(Action, name=st.just("bash"), arguments=arguments, call_id=st.just("c")), max_size=2)
turns = st.builds(
    Message,
    role=st.just("assistant"),
    content=texts,
    reasoning=st.none() | texts,
    actions=actions,
    trainable=st.booleans(),
)
others = st.builds(Message, role=st.sampled_from(["user", "tool"]), content=texts)
conversations = st.lists(turns | others, min_size=1, max_size=7).map(lambda rest: [Message("user", "task"), *rest])


def turn_text(message: Message) -> str:
    """What our ChatML writes for a turn, said independently of the template."""
    text = f"<think>\n{message.reasoning.strip(chr(10))}\n</think>\n\n" if message.reasoning else ""
    text += message.content.lstrip("\n")
    for number, action in enumerate(message.actions):
        text += "\n" if number or message.content.lstrip("\n") else ""
        call = {"name": action.name, "arguments": action.arguments}
        text += f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
    return text + "<|im_end|>"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=conversations)
def test_for_any_conversation_marks_and_prefixes_say_the_same(renderer: ChatRenderer, messages: list[Message]) -> None:
    trainable = [message for message in messages if message.role == "assistant" and message.trainable]
    if not trainable:
        with pytest.raises(RenderingError, match="no assistant turn to learn from"):
            renderer.encode(messages)
        return
    encoded = renderer.encode(messages)
    pieces = [encoded.text[turn.text_start : turn.text_end] for turn in encoded.turns]
    assert pieces == [turn_text(message) for message in messages if message.role == "assistant"]
    answers = [message for message in messages if message.role == "assistant"]
    kept = [turn for turn, answer in zip(encoded.turns, answers, strict=True) if answer.trainable]
    assert sum(encoded.assistant_mask) == sum(turn.end - turn.start for turn in kept)
    assert all(all(encoded.assistant_mask[turn.start : turn.end]) for turn in kept)
    text, spans = renderer._turns_by_prefix(messages, None)
    assert text == encoded.text
    assert spans == [(turn.text_start, turn.text_end) for turn in encoded.turns]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=conversations, one=turns, other=turns)
def test_prompt_tokens_do_not_depend_on_the_completion(
    renderer: ChatRenderer, messages: list[Message], one: Message, other: Message
) -> None:
    first = renderer.encode_completion(messages, [one])
    second = renderer.encode_completion(messages, [other])
    assert np.array_equal(first.prompt_ids, second.prompt_ids)
    # Qwen's tokenizer brings text into Unicode's composed form (NFC) first: some rare characters become others.
    assert renderer.tokenizer.decode(first.completion_ids) == unicodedata.normalize("NFC", turn_text(one))


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("no marks", lambda text: text.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")),
        (
            "the end of turn outside the marks",
            lambda text: text.replace(
                "{{- '<|im_end|>' }}\n        {%- endgeneration %}", "{%- endgeneration %}"
            ).replace("{%- endgeneration %}", "{%- endgeneration %}{{- '<|im_end|>' }}"),
        ),
        (
            "the newline inside the marks",
            lambda text: text.replace("{%- endgeneration %}\n        {{- '\\n' }}", "{{- '\\n' }}{%- endgeneration %}"),
        ),
        (
            "the header inside the marks",
            lambda text: text.replace(
                "{{- '<|im_start|>assistant\\n' }}\n        {%- generation %}",
                "{%- generation %}{{- '<|im_start|>assistant\\n' }}",
            ),
        ),
    ],
)
def test_marks_that_are_missing_or_misplaced_change_nothing(
    renderer: ChatRenderer, make_tokenizer: Callable[..., Any], what: str, change: Callable[[str], str]
) -> None:
    template = change(own_template("chatml"))
    assert template != own_template("chatml"), what
    other = ChatRenderer(make_tokenizer(template, *CHATML_TOKENS))
    assert parts(other) == parts(renderer)
    mine, own = (one.encode_completion(RUN[:2], RUN[2:], TOOLS) for one in (other, renderer))
    assert (mine.prompt_text, mine.completion_text) == (own.prompt_text, own.completion_text)
    for name in ("prompt_ids", "completion_ids", "completion_mask"):
        assert np.array_equal(getattr(mine, name), getattr(own, name))


def parts(renderer: ChatRenderer) -> tuple[Any, ...]:
    """All of an encoded conversation, to compare."""
    encoded = renderer.encode(RUN, TOOLS)
    return encoded.text, encoded.input_ids.tolist(), encoded.assistant_mask.tolist(), encoded.turns


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "qwen3-2507-instruct", "llama3", "chatml_plain"])
def test_a_lossy_template_still_renders_plain_text_runs_with_the_right_mask(
    make_tokenizer: Callable[..., Any], name: str
) -> None:
    tokens = LLAMA_TOKENS if name.startswith("llama") else CHATML_TOKENS
    renderer = ChatRenderer(make_tokenizer(like(name), *tokens))
    run = [Message("system", "S"), Message("user", "U"), Message("assistant", "A1"), Message("user", "O")]
    encoded = renderer.encode([*run, Message("assistant", "A2")])
    think = "<think>\n\n</think>\n\n" if name == "qwen3" else ""  # Qwen3 opens its last turn with an empty one
    end = renderer.end_of_turn
    assert learned(renderer, encoded.input_ids, encoded.assistant_mask) == f"A1{end}{think}A2{end}"


@pytest.mark.parametrize("name", ["qwen3", "qwen25", "llama3"])
def test_reasoning_that_a_template_drops_is_an_error_when_encoding(
    make_tokenizer: Callable[..., Any], name: str
) -> None:
    tokens = LLAMA_TOKENS if name.startswith("llama") else CHATML_TOKENS
    renderer = ChatRenderer(make_tokenizer(like(name), *tokens))
    run = [Message("user", "U"), Message("assistant", "A", reasoning="because"), Message("user", "O")]
    with pytest.raises(RenderingError, match=r"message 1 \(assistant\): 'because'"):
        renderer.encode([*run, Message("assistant", "B")])


def test_text_that_is_missing_or_out_of_order_is_named() -> None:
    messages = [Message("user", "first"), Message("assistant", "second")]
    check_nothing_lost(messages, "first second")
    with pytest.raises(RenderingError, match="message 1"):
        check_nothing_lost(messages, "second first")
    turn = replace(messages[1], actions=[Action("bash", {"deep": [{"key": 'needle "q"'}]}, "c")])
    check_nothing_lost([turn], 'second bash deep key needle \\"q\\"')
    with pytest.raises(RenderingError, match="needle"):
        check_nothing_lost([turn], "second bash deep key")


def test_a_template_that_changes_an_earlier_prompt_is_refused(make_tokenizer: Callable[..., Any]) -> None:
    counting = like("chatml_plain").replace("{% for message", "{{ messages | length }}{% for message", 1)
    renderer = ChatRenderer(make_tokenizer(own_template("chatml"), *CHATML_TOKENS))
    renderer.tokenizer.chat_template = counting
    with pytest.raises(RenderingError, match=r"renders the prompt differently|marks 0 of 1"):
        renderer.encode_completion([Message("user", "U")], [Message("assistant", "A")])
    losses = template_losses(make_tokenizer(counting, *CHATML_TOKENS))
    assert losses


def test_a_tokenizer_without_template_or_end_of_turn_says_what_to_do(make_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(TraceForgeError, match="no chat template"):
        ChatRenderer(make_tokenizer(None, *CHATML_TOKENS))
    endless = "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
    with pytest.raises(TraceForgeError, match="could not learn to stop"):
        ChatRenderer(make_tokenizer(endless, *CHATML_TOKENS))


def test_a_completion_must_be_turns_of_the_model(renderer: ChatRenderer) -> None:
    for completion in ([], [Message("user", "no")], [Message("assistant", "a"), Message("tool", "b")]):
        with pytest.raises(RenderingError, match="must begin and end with an assistant turn"):
            renderer.encode_completion([Message("user", "U")], completion)


def test_a_renderer_is_loaded_from_the_model_stage(tmp_path: Path, renderer: ChatRenderer) -> None:
    renderer.tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert parts(load_renderer(tmp_path)) == parts(renderer)
