"""Codex CLI rollouts: JSON Lines of `{timestamp, type, payload}`, or (older) the same items without a wrapper.

What the model produced between two inputs is one assistant turn. Events for the user interface repeat the items and
are not read. Reasoning is a summary at best: its text is encrypted. A compaction replaces the history, so a new
trajectory starts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import orjson

from traceforge_core.trajectories.formats import responses
from traceforge_core.trajectories.formats.chat import chat_message, text_of
from traceforge_core.trajectories.model import Message, Trajectory

_ITEMS = ("message", "reasoning", *responses.CALLS, *responses.ANSWERS)
_WRAPPERS = ("session_meta", "turn_context", "response_item", "event_msg", "compacted")
_EXIT_CODE = re.compile(r"(?:Process exited with code|Exit code:?) (-?\d{1,9})\b")


class Codex:
    """The lines of one rollout."""

    name = "codex-rollout"
    is_log = True

    def matches(self, value: Any) -> bool:
        if not isinstance(value, list):
            return False
        return any(
            isinstance(line, dict)
            and (
                (line.get("type") in _WRAPPERS and isinstance(line.get("payload"), dict))
                or line.get("record_type") == "state"
                or (line.get("type") in _ITEMS and ("call_id" in line or "summary" in line or _is_item_message(line)))
            )
            for line in value[:10]
        )

    def read(self, value: Any) -> Iterator[Trajectory]:
        left_out: Counter[str] = Counter()
        trajectory = Trajectory("", "", "", self.name, "", [])
        instructions: str | None = None
        part = 0
        for line in value:
            kind, payload = _unwrap(line)
            if kind == "item":
                _add_item(trajectory.messages, payload, left_out)
            elif kind == "turn_context":
                trajectory.model = payload["model"] if isinstance(payload.get("model"), str) else trajectory.model
            elif kind == "meta":
                instructions = instructions or _instructions(payload)
            elif kind == "compacted":
                trajectory.left_out = dict(left_out)
                if trajectory.messages:
                    yield _with_instructions(trajectory, instructions)
                part += 1
                left_out = Counter()
                trajectory = Trajectory(
                    "", "", f"part-{part}", self.name, "", _restart(payload, left_out), model=trajectory.model
                )
            else:
                left_out[kind] += 1
        trajectory.left_out = dict(left_out)
        if trajectory.messages:
            yield _with_instructions(trajectory, instructions)


def _unwrap(line: Any) -> tuple[str, dict[str, Any]]:
    """(what a line is, its payload): item, turn_context, meta, compacted, or the reason why it is left out."""
    if not isinstance(line, dict):
        return "line_that_is_no_event", {}
    kind, payload = str(line.get("type")), line.get("payload")
    if isinstance(payload, dict) and kind in _WRAPPERS:
        if kind == "response_item":
            return ("item", payload) if payload.get("type") in _ITEMS else ("response_item_of_other_kind", {})
        return {"session_meta": "meta", "event_msg": "interface_event"}.get(kind, kind), payload
    if kind in _ITEMS:
        return "item", line
    if "instructions" in line and "id" in line:
        return "meta", line
    return "bookkeeping_event", {}


def _add_item(messages: list[Message], item: dict[str, Any], left_out: Counter[str]) -> None:
    kind = item["type"]
    if kind in responses.ANSWERS:
        messages.append(_unpacked(responses.answer(item, left_out)))
    elif kind == "message" and item.get("role") != "assistant":
        messages.append(chat_message(item, left_out))
    else:
        if not messages or messages[-1].role != "assistant":
            messages.append(Message("assistant", ""))
        responses.add_item(messages[-1], item, left_out)


def _unpacked(message: Message) -> Message:
    """An answer is often JSON itself: `{"output": ..., "metadata": {"exit_code": ...}}`."""
    if message.content.startswith('{"'):
        try:
            value = orjson.loads(message.content)
        except orjson.JSONDecodeError:
            return message
        if isinstance(value, dict) and isinstance(value.get("output"), str) and value.keys() <= {"output", "metadata"}:
            message.content = value["output"]
            metadata = value.get("metadata")
            code = metadata.get("exit_code") if isinstance(metadata, dict) else None
            message.returncode = code if isinstance(code, int) and not isinstance(code, bool) else None
    elif found := _EXIT_CODE.match(message.content[:200]):
        message.returncode = int(found.group(1))
    return message


def _instructions(payload: dict[str, Any]) -> str | None:
    for key in ("base_instructions", "instructions"):
        value = payload.get(key)
        text = value.get("text") if isinstance(value, dict) else value
        if isinstance(text, str) and text.strip():
            return text
    return None


def _with_instructions(trajectory: Trajectory, instructions: str | None) -> Trajectory:
    """Put the session's instructions in front, unless a message repeats them (as `<user_instructions>`)."""
    if instructions and not any(instructions.strip() in message.content for message in trajectory.messages[:5]):
        trajectory.messages.insert(0, Message("system", instructions))
    return trajectory


def _restart(payload: dict[str, Any], left_out: Counter[str]) -> list[Message]:
    history = payload.get("replacement_history")
    messages: list[Message] = []
    for item in history if isinstance(history, list) else []:
        if isinstance(item, dict) and item.get("type") in _ITEMS:
            _add_item(messages, item, left_out)
    for message in messages:
        message.trainable = message.role != "assistant"
    text = text_of(payload.get("message"), left_out)
    return messages or ([Message("user", text)] if text else [])


def _is_item_message(line: dict[str, Any]) -> bool:
    content = line.get("content")
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") in ("input_text", "output_text") for part in content
    )
