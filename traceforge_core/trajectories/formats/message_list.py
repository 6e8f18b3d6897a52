"""A bare list of chat messages: a JSON array, as old mini-swe-agent versions write it, or one message a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from traceforge_core.trajectories.formats.chat import role_of
from traceforge_core.trajectories.formats.mini_swe_agent import BASH_TOOL, read_messages
from traceforge_core.trajectories.model import Trajectory


class MessageList:
    """`[{role, content, ...}, ...]` in one JSON document."""

    name = "message-list"
    is_log = False

    def matches(self, value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(_is_message(message) for message in value[:3])

    def read(self, value: Any) -> Iterator[Trajectory]:
        left_out: Counter[str] = Counter()
        messages = read_messages(value, left_out, {})
        trajectory = Trajectory("", "", "", self.name, "", messages, left_out=dict(left_out))
        calls = [action for message in messages for action in message.actions if not action.in_text]
        if any(call.name == "bash" and set(call.arguments) == {"command"} for call in calls):
            trajectory.tools = [BASH_TOOL]
        yield trajectory


class MessageLines(MessageList):
    """The same, one message a line."""

    is_log = True


def _is_message(raw: Any) -> bool:
    if not isinstance(raw, dict) or not ("content" in raw or "tool_calls" in raw):
        return False
    return role_of(raw.get("role")) is not None or raw.get("role") == "exit"
