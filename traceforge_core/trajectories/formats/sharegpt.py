"""ShareGPT rows: `conversations` of `{from, value}`, with LLaMA-Factory's `function_call` and `observation` turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import orjson

from traceforge_core.trajectories.formats.chat import arguments_of, role_of, split_think, text_of
from traceforge_core.trajectories.formats.chat_rows import fill_from_row, tools_of
from traceforge_core.trajectories.formats.protocol import Unreadable
from traceforge_core.trajectories.formats.text_actions import fenced_command, xml_functions
from traceforge_core.trajectories.model import Action, Message, Trajectory


class ShareGpt:
    """Rows with `conversations`. The first turn may be the assistant's: the task is then in `system`."""

    name = "sharegpt"
    is_log = False

    def matches(self, value: Any) -> bool:
        turns = value.get("conversations") if isinstance(value, dict) else None
        return (
            isinstance(turns, list)
            and bool(turns)
            and all(isinstance(turn, dict) and "from" in turn and "value" in turn for turn in turns[:3])
        )

    def read(self, value: Any) -> Iterator[Trajectory]:
        left_out: Counter[str] = Counter()
        messages = []
        if isinstance(value.get("system"), str) and value["system"]:
            messages.append(Message("system", value["system"]))
        messages += [_turn(raw, left_out) for raw in value["conversations"]]
        trajectory = Trajectory("", "", "", self.name, "", messages, tools=tools_of(value.get("tools")))
        fill_from_row(trajectory, value, left_out)
        name = value.get("id")
        if not trajectory.case and isinstance(name, (str, int)) and not isinstance(name, bool):
            trajectory.case = str(name)
        trajectory.left_out = dict(left_out)
        yield trajectory


def _turn(raw: Any, left_out: Counter[str]) -> Message:
    speaker = raw.get("from") if isinstance(raw, dict) else None
    role = "assistant" if speaker == "function_call" else role_of(speaker)
    if role is None:
        raise Unreadable("unknown_role", f"a turn of the conversation is from {speaker!r}")
    message = Message(role, text_of(raw.get("value"), left_out))
    if role == "assistant":
        split_think(message)
        calls = _json_calls(message.content) if speaker == "function_call" else []
        if calls:
            message.actions, message.content = calls, ""
        else:
            message.actions = xml_functions(message.content) or fenced_command(message.content)
    return message


def _json_calls(text: str) -> list[Action]:
    """LLaMA-Factory writes a call, or a list of them, as JSON: `{"name": ..., "arguments": ...}`."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return []
    calls = value if isinstance(value, list) else [value]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return []
    return [Action(call["name"], arguments_of(call.get("arguments"))) for call in calls]
