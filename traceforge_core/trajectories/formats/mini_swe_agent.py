"""mini-swe-agent, versions 1 and 2: `{info, messages, trajectory_format}`.

v1 and v2's text mode write the command into a fenced block of the assistant's text and observations as user messages;
v2 has tool calls. Which of the two, each message says itself. Never kept: the patch that ends a v1 run as a user
message, v2's exit message, and the raw provider response beside each turn (it repeats the turn, but for v1's
reasoning, which is read from there).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from traceforge_core.trajectories.formats import responses
from traceforge_core.trajectories.formats.chat import (
    arguments_of,
    call_id_of,
    chat_message,
    reasoning_of,
    returncode_of,
    tool_calls,
)
from traceforge_core.trajectories.formats.protocol import Unreadable
from traceforge_core.trajectories.formats.text_actions import fenced_command
from traceforge_core.trajectories.model import Action, Message, Trajectory
from traceforge_core.trajectories.outcome_files import as_label

FINAL_MARKERS = ("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "MINI_SWE_AGENT_FINAL_OUTPUT")
FORMAT_ERROR = "EXACTLY ONE action"
BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}
# An action regex comes out of a file that anyone may have written, and a hostile regex can run for ever. So only its
# fence language is taken over, and the regex itself is ours.
_KNOWN_REGEX = re.compile(r"(?:\\s\*)?```(\w+)(?:\\s\*)?\\n\(\.\*\?\)\\n(?:\\s\*)?```\Z")


class MiniSweAgent:
    """Files that say `trajectory_format: mini-swe-agent-…`, or look like one: `info` and `messages`."""

    is_log = False

    def __init__(self, version: int) -> None:
        self.name = f"mini-swe-agent-v{version}"
        self.version = version

    def matches(self, value: Any) -> bool:
        if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
            return False
        stated = value.get("trajectory_format")
        if isinstance(stated, str) and stated.startswith("mini-swe-agent"):
            return (stated == "mini-swe-agent-1") == (self.version == 1)
        if not isinstance(value.get("info"), dict):
            return False
        native = any(
            isinstance(m, dict) and ("tool_calls" in m or m.get("role") in ("tool", "exit") or m.get("object"))
            for m in value["messages"]
        )
        return native == (self.version == 2)

    def read(self, value: Any) -> Iterator[Trajectory]:
        info = value.get("info") if isinstance(value.get("info"), dict) else {}
        left_out: Counter[str] = Counter()
        messages = read_messages(value["messages"], left_out, info)
        exit_status = info.get("exit_status")
        trajectory = Trajectory(
            trajectory_id="",
            case=value["instance_id"] if isinstance(value.get("instance_id"), str) else "",
            run="",
            format=self.name,
            source="",
            messages=messages,
            exit_status=exit_status if isinstance(exit_status, str) else None,
            model=_model_name(info),
            left_out=dict(left_out),
        )
        if any(not action.in_text and action.name == "bash" for m in messages for action in m.actions):
            trajectory.tools = [BASH_TOOL]
        for key in () if value.get("eval_error") else ("resolved", "reward"):  # some trainers add their verdict
            if trajectory.outcome is None and (label := as_label(value.get(key))):
                trajectory.outcome, trajectory.outcome_source = label, f"field {key}"
        yield trajectory


def read_messages(raw_messages: list[Any], left_out: Counter[str], info: Mapping[str, Any]) -> list[Message]:
    """The canonical messages of a run. Raises Unreadable where an entry is no message."""
    language = _fence_language(info)
    submission = info.get("submission")
    messages: list[Message] = []
    last = len(raw_messages) - 1
    for index, raw in enumerate(raw_messages):
        if not isinstance(raw, dict):
            raise Unreadable("not_a_message", f"messages[{index}] is a {type(raw).__name__}, not an object")
        if raw.get("object") == "response" and isinstance(raw.get("output"), list):
            message = responses.assistant_turn(raw["output"], left_out)
        elif raw.get("type") in responses.ANSWERS:
            message = responses.answer(raw, left_out)
            message.returncode = returncode_of(raw, message.content)
        elif raw.get("role") == "exit":
            left_out["exit_message"] += 1
            continue
        else:
            message = chat_message(raw, left_out)
        if message.role == "assistant":
            _complete(message, raw, language)
        elif message.role == "user" and messages and messages[-1].role in ("assistant", "user"):
            if index == last and _is_trailing(message.content, messages[-1], submission, info):
                left_out["trailing_patch" if message.content.strip() else "exit_message"] += 1
                continue
            if _is_format_error(raw, message.content) and messages[-1].role == "assistant":
                messages[-1].trainable = False
        messages.append(message)
    return messages


def _complete(message: Message, raw: Mapping[str, Any], language: str | None) -> None:
    """Add to an assistant turn what stands beside its content: actions and reasoning in `extra`."""
    beside = raw.get("extra")
    extra = beside if isinstance(beside, dict) else {}
    if not message.actions:
        message.actions = _extra_actions(extra.get("actions"), message.content)
    if not message.actions:
        message.actions = fenced_command(message.content, language)
    if message.reasoning is None:
        message.reasoning = _reasoning_in_response(extra.get("response"))


def _extra_actions(raw: Any, text: str) -> list[Action]:
    if not isinstance(raw, list):
        return []
    if named := tool_calls([item for item in raw if isinstance(item, dict) and isinstance(item.get("function"), dict)]):
        return named
    return [
        Action(
            "bash",
            arguments_of({"command": item["command"]}),
            call_id_of(item),
            in_text="tool_call_id" not in item and "```" in text and item["command"].strip() in text,
        )
        for item in raw
        if isinstance(item, dict) and isinstance(item.get("command"), str)
    ]


def _reasoning_in_response(response: Any) -> str | None:
    if not isinstance(response, dict):
        return None
    choices = response.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        message = choices[0].get("message")
        return reasoning_of(message) if isinstance(message, dict) else None
    if isinstance(response.get("output"), list):
        items = [i for i in response["output"] if isinstance(i, dict) and i.get("type") == "reasoning"]
        return responses.assistant_turn(items, Counter()).reasoning
    return None


def _is_trailing(text: str, before: Message, submission: Any, info: Mapping[str, Any]) -> bool:
    """Whether the last user message is what ended the run (the submitted patch, or nothing) and no observation."""
    if isinstance(submission, str) and info.get("exit_status"):
        return text.strip() == submission.strip()
    return before.role == "assistant" and any(marker in before.content for marker in FINAL_MARKERS)


def _is_format_error(raw: Mapping[str, Any], text: str) -> bool:
    extra = raw.get("extra")
    if isinstance(extra, dict) and extra.get("interrupt_type") == "FormatError":
        return True
    return FORMAT_ERROR in text[:2000] and "<returncode>" not in text[:200]


def _fence_language(info: Mapping[str, Any]) -> str | None:
    config = info.get("config")
    for section in ("agent", "model"):
        part = config.get(section) if isinstance(config, dict) else None
        regex = part.get("action_regex") if isinstance(part, dict) else None
        if isinstance(regex, str) and (found := _KNOWN_REGEX.match(regex)):
            return found.group(1)
    return None


def _model_name(info: Mapping[str, Any]) -> str | None:
    config = info.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    name = model.get("model_name") if isinstance(model, dict) else None
    return name if isinstance(name, str) else None
