"""Messages at rest: JSON text in OpenAI's chat form, with the arguments of calls as JSON strings.

    text = messages_to_json(messages)          # a column of a dataset
    messages = messages_from_json(text)        # the same messages again

Arguments are strings because Arrow would give every call every other tool's keys; they are objects again once read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, cast

from traceforge_core.trajectories.model import Action, Message, Role

ROLES = {"developer": "system", "human": "user", "gpt": "assistant", "ai": "assistant", "function": "tool"}


def messages_to_json(messages: Sequence[Message]) -> str:
    """JSON text of a list of messages. What OpenAI's form has no place for (return code, not trainable, call shown in
    the text) is kept under `traceforge`."""
    return json.dumps([_to_dict(message) for message in messages])


def messages_from_json(text: str | Sequence[Any]) -> list[Message]:
    """Messages from JSON text or from already parsed dicts; also takes `reasoning` for `reasoning_content`, text parts
    and null content. Raises ValueError saying what is wrong with which message."""
    raw = json.loads(text) if isinstance(text, str) else text
    if not isinstance(raw, list) or not raw:
        raise ValueError("expected a list of messages with at least one in it")
    return [_from_dict(entry, number) for number, entry in enumerate(raw)]


def prompt_hash(messages: Sequence[Message], tools: Sequence[Any]) -> str:
    """Equal for two prompts exactly when the model would see the same: texts, calls and tool definitions."""
    seen = [
        [m.role, m.content, m.reasoning or "", [[a.name, a.arguments] for a in m.actions if not a.in_text]]
        for m in messages
    ]
    return hashlib.sha256(json.dumps([seen, list(tools)], sort_keys=True).encode()).hexdigest()


def _to_dict(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        entry["reasoning_content"] = message.reasoning
    if message.actions:
        entry["tool_calls"] = [
            {
                "id": action.call_id,
                "type": "function",
                "function": {"name": action.name, "arguments": json.dumps(action.arguments)},
                **({"traceforge": {"in_text": True}} if action.in_text else {}),
            }
            for action in message.actions
        ]
    if message.call_id is not None:
        entry["tool_call_id"] = message.call_id
    own: dict[str, Any] = {}
    if message.returncode is not None:
        own["returncode"] = message.returncode
    if not message.trainable:
        own["trainable"] = False
    if own:
        entry["traceforge"] = own
    return entry


def _from_dict(entry: Any, number: int) -> Message:
    if not isinstance(entry, dict):
        raise ValueError(f"message {number} is a {type(entry).__name__}, not an object")
    role = ROLES.get(str(entry.get("role")), entry.get("role"))
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"message {number} has the role {entry.get('role')!r}")
    own = entry.get("traceforge") or {}
    reasoning = entry.get("reasoning_content", entry.get("reasoning"))
    return Message(
        role=cast(Role, role),
        content=_text(entry.get("content"), number),
        reasoning=None if reasoning is None else _text(reasoning, number),
        actions=[_action(call, number) for call in entry.get("tool_calls") or []],
        call_id=entry.get("tool_call_id"),
        returncode=own.get("returncode"),
        trainable=own.get("trainable", True),
    )


def _action(call: Any, number: int) -> Action:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"message {number} has a tool call without function.name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"message {number}: the arguments of {function['name']} are not an object")
    return Action(
        function["name"],
        _clean(arguments),
        call.get("id"),
        bool((call.get("traceforge") or {}).get("in_text", False)),
    )


def _text(content: Any, number: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return str(_clean(content))
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return str(_clean("".join(texts)))
    raise ValueError(f"message {number} has content that is not text")


def _clean(value: Any) -> Any:
    """Lone surrogates, which neither UTF-8 nor Arrow can hold, become U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_clean(key): _clean(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_clean(inner) for inner in value]
    return value
