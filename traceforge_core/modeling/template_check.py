"""What a chat template would lose of an agent's run, found by rendering one that has everything in it.

    template_losses(tokenizer)   # [] where the template keeps everything, else one line a loss

A template loses quietly: reasoning before the last user message, text beside a call, whole observations. Each text of
the probe is a word that occurs nowhere else, so what is missing can be named.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.chat import ChatRenderer
from traceforge_core.modeling.messages import RenderingError
from traceforge_core.trajectories.model import Action, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "toolzq",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
QUOTED = 'say "argzq" twice'
"""An argument whose quotes show how often it was JSON-encoded."""


def template_losses(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What the tokenizer's own chat template loses, one line each, most telling first."""
    try:
        renderer = ChatRenderer(tokenizer)
    except RenderingError as error:
        return [f"a plain question and answer: {error}"]
    except TraceForgeError as error:
        return [str(error)]
    losses = [*_plain_losses(renderer), *_reasoning_losses(renderer), *_call_losses(renderer)]
    if not losses:
        losses = _token_losses(renderer)
    return losses


def _plain_losses(renderer: ChatRenderer) -> list[str]:
    messages = [
        Message("system", "systemzq"),
        Message("user", "taskzq"),
        Message("assistant", "firstzq"),
        Message("user", "observationzq"),
        Message("assistant", "secondzq"),
    ]
    names = {
        "systemzq": "the system message",
        "taskzq": "the task",
        "observationzq": "observations given as user messages",
        "firstzq": "text of earlier turns",
        "secondzq": "text of the last turn",
    }
    return _missing(renderer, messages, names, "system, user and assistant messages", tools=False)


def _reasoning_losses(renderer: ChatRenderer) -> list[str]:
    """Reasoning in a turn before an observation, before a mid-run user message, and in the last turn."""
    messages = [
        Message("user", "task"),
        Message("assistant", "text", reasoning="thinkzq1"),
        Message("user", "observation"),
        Message("assistant", "text", reasoning="thinkzq2"),
        Message("user", "observation"),
        Message("assistant", "text", reasoning="thinkzq3"),
    ]
    try:
        text = renderer.render(messages)
    except RenderingError as error:
        return [f"turns with reasoning: {error}"]
    kept = [number for number in (1, 2, 3) if f"thinkzq{number}" in text]
    if len(kept) == 3:
        return []
    if not kept:
        return ["reasoning: it is not rendered at all"]
    return [f"reasoning of every turn before the last user message ({3 - len(kept)} of 3 turns in the probe)"]


def _call_losses(renderer: ChatRenderer) -> list[str]:
    messages = [
        Message("user", "task"),
        Message("assistant", "besidezq", actions=[Action("toolzq", {"command": "commandzq"}, "call00001")]),
        Message("tool", "resultzq", call_id="call00001"),
        Message("assistant", "", actions=[Action("toolzq", {"command": QUOTED}, "call00002")]),
        Message("tool", "resultzq2", call_id="call00002"),
        Message("assistant", "done"),
    ]
    names = {
        "Runs a command.": "the definitions of the tools",
        "besidezq": "text beside a tool call",
        "commandzq": "tool calls",
        "resultzq": "observations (tool messages)",
    }
    losses = _missing(renderer, messages, names, "tool calls and their observations", tools=True)
    if losses:
        return losses
    text = renderer.render(messages, TOOLS)
    if QUOTED not in text and json.dumps(QUOTED)[1:-1] not in text:
        losses.append("arguments of tool calls: quotes in them are encoded twice")
    parallel = [
        Message("user", "task"),
        Message(
            "assistant",
            "",
            actions=[Action("toolzq", {"command": f"parallelzq{n}"}, f"call0001{n}") for n in (1, 2)],
        ),
        Message("tool", "result", call_id="call00011"),
        Message("tool", "result", call_id="call00012"),
        Message("assistant", "done"),
    ]
    names = {"parallelzq1": "the first of several calls in a turn", "parallelzq2": "all but the first call of a turn"}
    return losses + _missing(renderer, parallel, names, "several tool calls in a turn", tools=True)


def _token_losses(renderer: ChatRenderer) -> list[str]:
    """The text is whole; can the model's own tokens be told from the rest?"""
    head = [Message("system", "system"), Message("user", "task")]
    turns = [
        Message("assistant", "text", reasoning="think", actions=[Action("toolzq", {"command": "ls"}, "call00001")]),
        Message("tool", "result", call_id="call00001"),
        Message("user", "go on"),
        Message("assistant", "done", reasoning="think"),
    ]
    try:
        renderer.encode_completion(head, turns, TOOLS)
        renderer.encode([*head, *turns], TOOLS)
    except RenderingError as error:
        return [f"the border between prompt and turn: {error}"]
    return []


def _missing(
    renderer: ChatRenderer, messages: list[Message], names: dict[str, str], what: str, *, tools: bool
) -> list[str]:
    try:
        text = renderer.render(messages, TOOLS if tools else None)
    except RenderingError as error:
        return [f"{what}: {error}"]
    return [name for sentinel, name in names.items() if sentinel not in text]
