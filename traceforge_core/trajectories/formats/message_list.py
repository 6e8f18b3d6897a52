"""A bare list of chat messages, as old mini-swe-agent versions and many scripts write it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from traceforge_core.trajectories.formats.chat import ROLES
from traceforge_core.trajectories.formats.mini_swe_agent import BASH_TOOL, read_messages
from traceforge_core.trajectories.model import Trajectory


class MessageList:
    """`[{role, content, ...}, ...]`."""

    name = "message-list"
    is_log = False

    def matches(self, value: Any) -> bool:
        return (
            isinstance(value, list)
            and bool(value)
            and all(isinstance(m, dict) and m.get("role") in (*ROLES, "exit") and "content" in m for m in value[:3])
        )

    def read(self, value: Any) -> Iterator[Trajectory]:
        left_out: Counter[str] = Counter()
        messages = read_messages(value, left_out, {})
        trajectory = Trajectory("", "", "", self.name, "", messages, left_out=dict(left_out))
        if any(
            not a.in_text and a.name == "bash" and set(a.arguments) == {"command"} for m in messages for a in m.actions
        ):
            trajectory.tools = [BASH_TOOL]
        yield trajectory
