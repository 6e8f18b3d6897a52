"""Turns of OpenAI's Responses API, made canonical: what mini-swe-agent and Codex write where that API is used.

An assistant turn is a list of items (`reasoning`, `message`, `function_call`); a tool's answer is an item of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from traceforge_core.trajectories.formats.chat import arguments_of, call_id_of, dump, text_of
from traceforge_core.trajectories.model import Action, Message

CALLS = ("function_call", "custom_tool_call", "local_shell_call")
ANSWERS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")


def assistant_turn(items: Iterable[Any], left_out: Counter[str]) -> Message:
    """One assistant message from the output items of one response."""
    message = Message("assistant", "")
    for item in items:
        if isinstance(item, Mapping):
            add_item(message, item, left_out)
    return message


def add_item(message: Message, item: Mapping[str, Any], left_out: Counter[str]) -> None:
    """Add one output item to the assistant turn it belongs to."""
    kind = item.get("type")
    if kind == "reasoning":
        text = reasoning_text(item, left_out)
        if text:
            message.reasoning = f"{message.reasoning}\n\n{text}" if message.reasoning else text
        elif item.get("encrypted_content"):
            left_out["encrypted_reasoning"] += 1
    elif kind == "message":
        text = text_of(item.get("content"), left_out)
        message.content = f"{message.content}\n{text}" if message.content and text else message.content or text
    elif kind in CALLS:
        message.actions.append(call(item))
    else:
        left_out[f"response_item_{str(kind)[:40]}"] += 1


def reasoning_text(item: Mapping[str, Any], left_out: Counter[str]) -> str:
    """What a reasoning item says in plain text: its content, else its summary."""
    for key in ("content", "summary"):
        value = item.get(key)
        if isinstance(value, list) and value:
            return text_of(value, left_out)
        if isinstance(value, str) and value.strip():
            return value
    return ""


def call(item: Mapping[str, Any]) -> Action:
    """The action of a call item; a local shell call has its command under `action`, a custom tool plain `input`."""
    kind = item.get("type")
    if kind == "local_shell_call":
        return Action("local_shell", arguments_of(item.get("action")), call_id_of(item))
    name = item.get("name")
    raw = item.get("arguments") if kind == "function_call" else item.get("input")
    arguments = arguments_of(raw) if kind == "function_call" else {"input": raw if raw is not None else ""}
    return Action(name if isinstance(name, str) else str(kind), arguments, item.get("call_id") or call_id_of(item))


def answer(item: Mapping[str, Any], left_out: Counter[str]) -> Message:
    """The observation of an answer item."""
    output = item.get("output")
    content = output if isinstance(output, str) else text_of(output, left_out) if _is_parts(output) else dump(output)
    message = Message("tool", content if output is not None else "")
    message.call_id = call_id_of({"call_id": item.get("call_id")})
    return message


def _is_parts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, Mapping) and "type" in part for part in value)
