"""A message as chat templates take it, and the check that a rendering kept all of it.

check_nothing_lost(messages, text)     # RenderingError naming the first text that is not there
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from traceforge_core.errors import TraceForgeError
from traceforge_core.trajectories.model import Action, Message


class RenderingError(TraceForgeError):
    """A conversation that the chat template refuses, or does not keep whole."""


def chat_dict(message: Message) -> dict[str, Any]:
    """A message as chat templates take it: content a string, arguments an object (JSON text would be encoded twice)."""
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        chat["reasoning_content"] = message.reasoning
    calls = called_actions(message)
    if calls:
        chat["tool_calls"] = [
            {
                "id": action.call_id or f"call_{position}",
                "type": "function",
                "function": {"name": action.name, "arguments": action.arguments},
            }
            for position, action in enumerate(calls)
        ]
    if message.role == "tool" and message.call_id:
        chat["tool_call_id"] = message.call_id
    return chat


def called_actions(message: Message) -> list[Action]:
    """The actions that are rendered as tool calls: those that the message's own text does not show already."""
    return [action for action in message.actions if not action.in_text]


def texts_of(message: Message) -> Iterator[str]:
    """Every text of a message that must be found in a rendering: reasoning, content, and what its calls say."""
    yield message.reasoning or ""
    yield message.content
    yield from _texts_of_calls(message)


def _texts_of_calls(message: Message) -> Iterator[str]:
    """Names, keys and string values of the calls."""
    for action in called_actions(message):
        yield action.name
        yield from _strings_in(action.arguments)


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _strings_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings_in(inner)


def check_nothing_lost(messages: Sequence[Message], text: str) -> None:
    """Raise RenderingError where a text of `messages` is not in `text`, or not in order.

    Surrounding white space may go (templates trim it); argument strings may stand as they are or JSON-encoded once.
    """
    position = 0
    for number, message in enumerate(messages):
        plain = (message.reasoning or "", message.content)
        ends = [position, *(_end_of(own.strip(), text, position) for own in plain)]
        for own in _texts_of_calls(message):
            # The nearer of the two: the other may be what a later message says.
            forms = {own.strip(), json.dumps(own, ensure_ascii=False)[1:-1].strip()}
            found = [end for end in (_end_of(form, text, position) for form in forms) if end >= 0]
            ends.append(min(found, default=-1))
        if min(ends) < 0:
            lost = list(texts_of(message))[ends.index(-1) - 1].strip()
            shown = lost if len(lost) <= 60 else lost[:57] + "..."
            raise RenderingError(f"The chat template lost text of message {number} ({message.role}): {shown!r}.")
        position = max(ends)


def _end_of(wanted: str, text: str, position: int) -> int:
    found = text.find(wanted, position)
    return found if found < 0 else found + len(wanted)
