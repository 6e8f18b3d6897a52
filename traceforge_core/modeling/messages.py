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
    """Every text of a message that must be found in a rendering: reasoning, content, names and string arguments of
    calls."""
    if message.reasoning:
        yield message.reasoning
    yield message.content
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
        furthest = position
        for own in texts_of(message):
            wanted = own.strip()
            found = text.find(wanted, position)
            if found < 0:
                wanted = json.dumps(own, ensure_ascii=False)[1:-1]
                found = text.find(wanted, position)
            if found < 0:
                shown = wanted if len(wanted) <= 60 else wanted[:57] + "..."
                raise RenderingError(f"The chat template lost text of message {number} ({message.role}): {shown!r}.")
            furthest = max(furthest, found + len(wanted))
        position = furthest
