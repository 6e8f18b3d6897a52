"""OpenHands completion logs: what went into one model call and what came out, one file a call.

The calls of a run repeat each other's messages: the file of the last call holds all of it. `reading.py` gives this
format one file at a time, and leaves out files whose conversation a later one goes on with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from traceforge_core.trajectories.formats.chat import chat_message, text_of
from traceforge_core.trajectories.formats.protocol import Unreadable
from traceforge_core.trajectories.formats.responses import assistant_turn
from traceforge_core.trajectories.formats.text_actions import xml_functions
from traceforge_core.trajectories.model import Message, Trajectory


class CompletionLog:
    """`{messages, response, ...}` with at least one of the fields that only a log has."""

    name = "openhands-completions"
    is_log = False

    def matches(self, value: Any) -> bool:
        return (
            isinstance(value, dict)
            and isinstance(value.get("messages"), list)
            and isinstance(value.get("response"), dict)
            and bool({"kwargs", "latency_sec", "context_window", "fncall_messages", "raw_messages"} & value.keys())
        )

    def read(self, value: Any) -> Iterator[Trajectory]:
        left_out: Counter[str] = Counter()
        messages = []
        for raw in value["messages"]:
            if not isinstance(raw, dict):
                raise Unreadable("not_a_message", f"messages holds a {type(raw).__name__}")
            messages.append(chat_message(raw, left_out))
        messages.append(_response(value["response"], left_out))
        for message in messages:
            if message.role == "assistant" and not message.actions:
                message.actions = xml_functions(message.content)
        tools = value.get("tools")
        kwargs = value.get("kwargs")
        if not isinstance(tools, list) and isinstance(kwargs, dict):
            tools = kwargs.get("tools")
        model = value["response"].get("model")
        yield Trajectory(
            "",
            "",
            "",
            self.name,
            "",
            messages,
            tools=[tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else [],
            model=model if isinstance(model, str) else None,
            left_out=dict(left_out),
        )


def _response(response: dict[str, Any], left_out: Counter[str]) -> Message:
    choices = response.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        raw = choices[0].get("message")
        if isinstance(raw, dict):
            return chat_message({**raw, "role": "assistant"}, left_out)
    if isinstance(response.get("output"), list):
        return assistant_turn(response["output"], left_out)
    text = text_of(response.get("content"), left_out)
    if not text:
        raise Unreadable("no_response", "the call's response holds no message")
    return Message("assistant", text)
