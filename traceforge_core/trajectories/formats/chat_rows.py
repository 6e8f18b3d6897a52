"""OpenAI chat files and Hugging Face rows: one object with `messages` (or `trajectory`), as JSON, JSON Lines or
Parquet.

A row's own fields give case, run, model, tools and outcome; what evaluation wrote beside them (test output, gold
patch) is never read into a message. Messages and tools may be JSON text, and null-padded keys are normal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import orjson

from traceforge_core.trajectories.formats.chat import chat_message, role_of
from traceforge_core.trajectories.formats.protocol import Unreadable
from traceforge_core.trajectories.formats.text_actions import fenced_command, xml_functions
from traceforge_core.trajectories.model import Message, Trajectory
from traceforge_core.trajectories.outcome_files import as_label

_CASE_KEYS = ("instance_id", "case", "task_id", "task_name", "problem_id")
_RUN_KEYS = ("run_id", "traj_id", "trajectory_id", "run")
_OUTCOME_KEYS = ("resolved", "target", "verified", "is_resolved", "reward")
_EXIT_KEYS = ("exit_status", "exit_reason", "error")
_HIDDEN = ("eval_logs", "test_output", "gold_patch", "test_patch", "gen_tests_correct")
# SWE-Gym and nebius number the attempts at one instance in its name: `python__mypy-15976_0`.
_ATTEMPT = re.compile(r"(.+__.+-\d+)_(\d+)\Z")


class ChatRows:
    """Rows with chat messages. Those that name an instance are called `hf-rows`, others `openai-chat`."""

    name = "openai-chat"
    is_log = False

    def matches(self, value: Any) -> bool:
        messages = _messages_of(value)
        return messages is not None and all(isinstance(m, dict) and role_of(m.get("role")) for m in messages[:3])

    def read(self, value: Any) -> Iterator[Trajectory]:
        left_out: Counter[str] = Counter()
        messages: list[Message] = []
        for position, raw in enumerate(_messages_of(value) or []):
            if not isinstance(raw, dict):
                raise Unreadable("not_a_message", f"messages[{position}] is a {type(raw).__name__}")
            message = chat_message(raw, left_out)
            if message.role == "assistant" and not message.actions:
                message.actions = xml_functions(message.content) or fenced_command(message.content)
            if message.role == "assistant" and (raw.get("mask") is False or raw.get("weight") == 0):
                message.trainable = False
            messages.append(message)
        trajectory = Trajectory("", "", "", self.name, "", messages, tools=tools_of(value.get("tools")))
        fill_from_row(trajectory, value, left_out)
        if trajectory.case:
            trajectory.format = "hf-rows"
        trajectory.left_out = dict(left_out)
        yield trajectory


def fill_from_row(trajectory: Trajectory, row: dict[str, Any], left_out: Counter[str]) -> None:
    """Case, run, model, exit and outcome from a row's own fields."""
    case = _first_text(row, _CASE_KEYS)
    run = _first_text(row, _RUN_KEYS)
    if case and (found := _ATTEMPT.match(case)):
        case, attempt = found.groups()
        run = f"{run}_{attempt}" if run else attempt
    trajectory.case, trajectory.run = case or "", run or ""
    trajectory.model = _first_text(row, ("model", "model_name", "model_name_or_path"))
    trajectory.exit_status = _first_text(row, _EXIT_KEYS)
    report = row.get("report")
    result = row.get("test_result")
    if isinstance(result, dict):
        report = result.get("report", report)
        left_out["hidden_test_log"] += bool(result.get("test_output"))
    for place, where in ((row, ""), (report, "report.")):
        for key in _OUTCOME_KEYS:
            label = as_label(place.get(key)) if isinstance(place, dict) else None
            if label and trajectory.outcome is None:
                trajectory.outcome, trajectory.outcome_source = label, f"row field {where}{key}"
    left_out["hidden_test_log"] += any(bool(row.get(key)) for key in _HIDDEN)
    if not left_out["hidden_test_log"]:
        del left_out["hidden_test_log"]


def tools_of(raw: Any) -> list[dict[str, Any]]:
    """Tool definitions in OpenAI's function format, from a list or JSON text; keys that are null padding go."""
    raw = _decoded(raw)
    if not isinstance(raw, list):
        return []
    tools = []
    for tool in raw:
        tool = _decoded(tool)
        if isinstance(tool, dict):
            tool = _without_nulls(tool)
            tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tools


def _messages_of(value: Any) -> list[Any] | None:
    if not isinstance(value, dict):
        return None
    for key in ("messages", "trajectory"):
        messages = _decoded(value.get(key))
        if isinstance(messages, list) and messages:
            return messages
    prompt, completion = value.get("prompt"), value.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*prompt, *completion]
    return None


def _decoded(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return None
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _first_text(row: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    for key in keys:
        value = row.get(key)
        if isinstance(value, str) and value:
            return value[:300]
        if isinstance(value, int) and not isinstance(value, bool) and key in _RUN_KEYS:
            return str(value)
    return None
