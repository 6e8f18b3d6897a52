"""nebius/SWE-agent-trajectories: rows whose `trajectory` has the roles system, user and ai, and `text` for content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from traceforge_core.trajectories.formats.chat import role_of, split_think, text_of
from traceforge_core.trajectories.formats.chat_rows import fill_from_row
from traceforge_core.trajectories.formats.protocol import Unreadable
from traceforge_core.trajectories.formats.text_actions import last_block, xml_functions
from traceforge_core.trajectories.model import Message, Trajectory


class Nebius:
    """Rows with a `trajectory` of `{role, text, system_prompt, mask}`. `mask` says whether a turn is for training."""

    name = "nebius-swe-agent"
    is_log = False

    def matches(self, value: Any) -> bool:
        steps = value.get("trajectory") if isinstance(value, dict) else None
        return (
            isinstance(steps, list)
            and bool(steps)
            and all(isinstance(step, dict) and "text" in step and role_of(step.get("role")) for step in steps[:3])
        )

    def read(self, value: Any) -> Iterator[Trajectory]:
        left_out: Counter[str] = Counter()
        messages = []
        for step in value["trajectory"]:
            role = role_of(step.get("role")) if isinstance(step, dict) else None
            if role is None:
                raise Unreadable("unknown_role", f"a step of the trajectory: {str(step)[:80]}")
            text = step.get("text")
            message = Message(role, text_of(text if text is not None else step.get("system_prompt"), left_out))
            if role == "assistant":
                split_think(message)
                message.actions = xml_functions(message.content) or last_block(message.content)
                message.trainable = step.get("mask") is not False
            messages.append(message)
        trajectory = Trajectory("", "", "", self.name, "", messages)
        fill_from_row(trajectory, value, left_out)
        trajectory.left_out = dict(left_out)
        yield trajectory
