"""Chat messages as providers and agents write them, made canonical: what several formats have in common.

    message = chat_message(raw, left_out)

Content may be a string, null, or a list of parts (OpenAI, Responses API and Anthropic kinds); tool-call arguments may
be a JSON string, an object or null; reasoning has half a dozen names. Nothing that a model wrote is lost; what is not
text (images) is counted in `left_out`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from traceforge_core.trajectories.formats.protocol import Unreadable
from traceforge_core.trajectories.model import Action, Message, Role

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
_RETURNCODE = re.compile(r"<returncode>\s*(-?\d{1,10})\s*</returncode>")
_THINK = re.compile(r"\A\s*<think(?:ing)?>\n?(.*?)\n?</think(?:ing)?>\s*", re.DOTALL)


def role_of(name: Any) -> Role | None:
    """The canonical role that a name means, in capitals or not; None for what is no name of a role."""
    return ROLES.get(name.lower()) if isinstance(name, str) else None


def chat_message(raw: Mapping[str, Any], left_out: Counter[str]) -> Message:
    """One chat message with a `role`. Raises Unreadable for a role that nobody knows."""
    role = role_of(raw.get("role"))
    if role is None:
        raise Unreadable("unknown_role", f"a message has the role {raw.get('role')!r}")
    content = raw.get("content")
    message = Message(role, text_of(content, left_out))
    if role == "assistant":
        message.reasoning = reasoning_of(raw) or thinking_in(content)
        split_think(message)
        message.actions = tool_calls(raw.get("tool_calls")) or tool_uses(content)
        legacy = raw.get("function_call")
        if not message.actions and isinstance(legacy, Mapping):
            message.actions = tool_calls([{"function": legacy}])
    elif role == "tool":
        message.call_id = call_id_of(raw)
    if role in ("tool", "user"):
        message.returncode = returncode_of(raw, message.content)
    return message


def text_of(content: Any, left_out: Counter[str]) -> str:
    """The text of a message's content: parts joined by line breaks, null as ''. Counts parts that are not text."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, list):
        return dump(content)
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif not isinstance(part, Mapping):
            texts.append(dump(part))
        elif isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif part.get("type") in ("thinking", "redacted_thinking", "tool_use", "reasoning"):
            continue  # read as reasoning and as actions
        elif isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
        elif "content" in part:
            texts.append(text_of(part["content"], left_out))
        elif part.get("type") in ("text", "input_text", "output_text"):
            continue  # a text part whose text is null
        else:
            left_out["part_that_is_not_text"] += 1
    return "\n".join(texts)


def reasoning_of(raw: Mapping[str, Any]) -> str | None:
    """The reasoning beside a message's content, under whichever name it has there."""
    for key in REASONING_KEYS:
        value = raw.get(key)
        if isinstance(value, str) and value.strip():
            return value
    for key in ("thinking_blocks", "reasoning_details"):
        if text := _joined(raw.get(key)):
            return text
    fields = raw.get("provider_specific_fields")
    if isinstance(fields, Mapping):
        return reasoning_of(fields)
    return None


def thinking_in(content: Any) -> str | None:
    """The thinking parts of an Anthropic-style content list."""
    if not isinstance(content, list):
        return None
    return _joined([part for part in content if isinstance(part, Mapping) and part.get("type") == "thinking"])


def split_think(message: Message) -> None:
    """Move a leading `<think>` block from the text into `reasoning`; drop it where the same text is there already."""
    if "<think" not in message.content[:64]:
        return
    found = _THINK.match(message.content)
    if found is None:
        return
    if message.reasoning is None:
        message.reasoning = found.group(1).strip() or None
    elif message.reasoning.strip() != found.group(1).strip():
        return
    message.content = message.content[found.end() :]


def tool_calls(raw: Any) -> list[Action]:
    """Actions from a `tool_calls` list: `{id, function: {name, arguments}}`, `{tool_call_id, function_name, arguments}`
    or `{id, name, arguments}`."""
    if not isinstance(raw, list):
        return []
    actions = []
    for call in raw:
        if not isinstance(call, Mapping):
            continue
        inner = call.get("function")
        function = inner if isinstance(inner, Mapping) else call
        name = function.get("name") or function.get("function_name")
        if isinstance(name, str):
            actions.append(Action(name, arguments_of(function.get("arguments")), call_id_of(call)))
    return actions


def tool_uses(content: Any) -> list[Action]:
    """Actions from the `tool_use` parts of an Anthropic-style content list."""
    if not isinstance(content, list):
        return []
    return [
        Action(str(part.get("name") or ""), arguments_of(part.get("input")), call_id_of(part))
        for part in content
        if isinstance(part, Mapping) and part.get("type") == "tool_use"
    ]


def call_id_of(raw: Mapping[str, Any]) -> str | None:
    """The id that ties a call and its answer together."""
    for key in ("tool_call_id", "call_id", "id", "tool_use_id"):
        value = raw.get(key)
        if isinstance(value, str) and value:
            return value
    several = raw.get("tool_call_ids")
    if isinstance(several, list) and several and isinstance(several[0], str):
        return several[0]
    return None


def arguments_of(raw: Any) -> dict[str, Any]:
    """Arguments as an object. Text that is no JSON object is kept whole under `input`."""
    if isinstance(raw, str):
        try:
            parsed = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return {"input": raw} if raw.strip() else {}
        return parsed if isinstance(parsed, dict) else {"input": raw}
    if isinstance(raw, dict):
        return raw
    return {} if raw is None else {"input": raw}


def returncode_of(raw: Mapping[str, Any], text: str) -> int | None:
    """The exit status of an observation: from the message's `extra`, else from a `<returncode>` tag at its start."""
    extra = raw.get("extra")
    if isinstance(extra, Mapping):
        value = extra.get("returncode")
        if isinstance(value, int) and not isinstance(value, bool) and -(2**31) <= value < 2**31:
            return value
    found = _RETURNCODE.search(text, 0, 4096) if "<returncode>" in text[:4096] else None
    return int(found.group(1)) if found else None


def dump(value: Any) -> str:
    """Any JSON value as text."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
    except (orjson.JSONEncodeError, TypeError):
        return str(value)


def _joined(blocks: Any) -> str | None:
    if not isinstance(blocks, Iterable) or isinstance(blocks, (str, Mapping)):
        return None
    texts = []
    for block in blocks:
        if isinstance(block, Mapping):
            for key in ("thinking", "text", "summary"):
                if isinstance(block.get(key), str) and block[key].strip():
                    texts.append(block[key])
                    break
    return "\n".join(texts) or None
