"""OpenHands SDK (V1): events with a `kind`, as JSON Lines or as one file an event.

Actions that came from one model response are one assistant turn. Reasoning is taken from `reasoning_content`; the same
text in `<think>` tags inside the thought is not kept twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from traceforge_core.trajectories.formats.chat import (
    arguments_of,
    chat_message,
    dump,
    reasoning_of,
    split_think,
    text_of,
    tool_calls,
)
from traceforge_core.trajectories.formats.responses import reasoning_text
from traceforge_core.trajectories.model import Action, Message, Trajectory

_ANSWERS = ("ObservationEvent", "AgentErrorEvent", "UserRejectObservation")


class OpenHandsSdk:
    """A list of events of one conversation."""

    name = "openhands-sdk"
    is_log = True

    def matches(self, value: Any) -> bool:
        return isinstance(value, list) and any(
            isinstance(event, dict) and isinstance(event.get("kind"), str) and "source" in event and "id" in event
            for event in value[:5]
        )

    def read(self, value: Any) -> Iterator[Trajectory]:
        left_out: Counter[str] = Counter()
        trajectory = Trajectory("", "", "", self.name, "", [])
        turns: dict[str, Message] = {}
        for event in value:
            kind = event.get("kind") if isinstance(event, dict) else None
            if kind == "ActionEvent":
                _add_action(trajectory, event, turns, left_out)
            elif kind in _ANSWERS:
                trajectory.messages.append(_answer(event, left_out))
            elif kind == "MessageEvent" and isinstance(event.get("llm_message"), dict):
                trajectory.messages.append(chat_message(event["llm_message"], left_out))
            elif kind == "SystemPromptEvent":
                trajectory.messages.append(Message("system", text_of(event.get("system_prompt"), left_out)))
                if isinstance(event.get("tools"), list):
                    trajectory.tools = [tool for tool in event["tools"] if isinstance(tool, dict)]
            else:
                left_out["bookkeeping_event" if kind else "line_that_is_no_event"] += 1
                _note_model(trajectory, event)
        trajectory.left_out = dict(left_out)
        yield trajectory


def _add_action(
    trajectory: Trajectory, event: dict[str, Any], turns: dict[str, Message], left_out: Counter[str]
) -> None:
    key = event.get("llm_response_id")
    turn = turns.get(key) if isinstance(key, str) else None
    if turn is None:
        turn = Message("assistant", text_of(event.get("thought"), left_out), reasoning_of(_without_thought(event)))
        item = event.get("responses_reasoning_item")
        if turn.reasoning is None and isinstance(item, dict):
            turn.reasoning = reasoning_text(item, left_out) or None
        split_think(turn)
        trajectory.messages.append(turn)
        if isinstance(key, str):
            turns[key] = turn
    turn.actions += tool_calls([event.get("tool_call")]) or [
        Action(str(event.get("tool_name") or ""), arguments_of(event.get("action")), event.get("tool_call_id"))
    ]


def _without_thought(event: dict[str, Any]) -> dict[str, Any]:
    return {key: event.get(key) for key in ("reasoning_content", "thinking_blocks")}


def _answer(event: dict[str, Any], left_out: Counter[str]) -> Message:
    observation = event.get("observation")
    if event["kind"] == "AgentErrorEvent":
        text = text_of(event.get("error"), left_out)
    elif isinstance(observation, dict):
        body = next((observation[key] for key in ("content", "output", "text") if observation.get(key)), None)
        text = text_of(body, left_out) if body is not None else dump(observation)
    else:
        text = text_of(observation if observation is not None else event.get("rejection_reason"), left_out)
    message = Message("tool", text, call_id=event.get("tool_call_id"))
    code = observation.get("exit_code") if isinstance(observation, dict) else None
    if isinstance(code, int) and not isinstance(code, bool):
        message.returncode = code
    return message


def _note_model(trajectory: Trajectory, event: Any) -> None:
    value = event.get("value") if isinstance(event, dict) and event.get("key") == "stats" else None
    metrics = value.get("usage_to_metrics") if isinstance(value, dict) else None
    if isinstance(metrics, dict):
        for usage in metrics.values():
            if isinstance(usage, dict) and isinstance(usage.get("model_name"), str):
                trajectory.model = usage["model_name"]
                return
