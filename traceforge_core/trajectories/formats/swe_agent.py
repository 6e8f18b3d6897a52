"""SWE-agent `.traj` files, 0.x and 1.x: `{trajectory, history, info, ...}`.

The history is the conversation as the model saw it. Files without one (newer versions may keep only the last step's
input under `query`) are put together from the steps. The copies of the history that older versions repeat at every
step are not read. A demonstration stays in the history but is never learnt from, nor is the "exit due to cost limit"
turn that the agent itself writes in the model's name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import orjson

from traceforge_core.trajectories.formats.chat import chat_message
from traceforge_core.trajectories.formats.protocol import Unreadable
from traceforge_core.trajectories.formats.text_actions import last_block, xml_functions
from traceforge_core.trajectories.model import Action, Message, Trajectory

COST_EXIT = "Exit due to"


class SweAgent:
    """Files with a `trajectory` of steps (`action`, `observation`) beside a `history` or `info`."""

    name = "swe-agent"
    is_log = False

    def matches(self, value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        steps, history = value.get("trajectory"), value.get("history")
        if not isinstance(steps, list) or not (isinstance(history, list) or isinstance(value.get("info"), dict)):
            return False
        return all(isinstance(step, dict) and "action" in step for step in steps[:3])

    def read(self, value: Any) -> Iterator[Trajectory]:
        left_out: Counter[str] = Counter()
        info = value["info"] if isinstance(value.get("info"), dict) else {}
        messages = [_message(raw, left_out) for raw in _history(value)]
        _drop_trailing_patch(messages, info, left_out)
        exit_status = info.get("exit_status")
        yield Trajectory(
            trajectory_id="",
            case="",
            run="",
            format=self.name,
            source="",
            messages=messages,
            exit_status=exit_status if isinstance(exit_status, str) else None,
            model=_model_name(value.get("replay_config")),
            left_out=dict(left_out),
        )


def _history(value: dict[str, Any]) -> list[Any]:
    """The conversation: the history, else the last step's input and output, else the steps themselves."""
    history = value.get("history")
    if isinstance(history, list) and history:
        return history
    steps = value["trajectory"]
    if not steps:
        raise Unreadable("no_messages", "neither history nor steps")
    last = steps[-1]
    for key in ("query", "messages"):
        before = last.get(key)
        if isinstance(before, list) and before:
            own = {"role": "assistant", "content": last.get("response"), "action": last.get("action")}
            answered = key == "messages" and any(m.get("role") == "assistant" for m in before[-2:])
            return before if answered else [*before, own]
    turns: list[Any] = []
    for step in steps:
        turns.append({"role": "assistant", "content": step.get("response"), "action": step.get("action")})
        turns.append({"role": "user", "content": step.get("observation")})
    return turns


def _message(raw: Any, left_out: Counter[str]) -> Message:
    if not isinstance(raw, dict):
        raise Unreadable("not_a_message", f"the history holds a {type(raw).__name__}")
    plain = {key: item for key, item in raw.items() if key != "thought"}  # SWE-agent's thought is a part of the content
    message = chat_message(plain, left_out)
    if message.role != "assistant":
        return message
    if not message.actions:
        message.actions = xml_functions(message.content) or _stated_action(raw, message.content)
    if raw.get("is_demo") or message.content.startswith(COST_EXIT):
        message.trainable = False
    return message


def _stated_action(raw: dict[str, Any], text: str) -> list[Action]:
    action = raw.get("action")
    if isinstance(action, str) and action.strip():
        return [Action("bash", {"command": action.strip()}, in_text=action.strip() in text)]
    return last_block(text)


def _drop_trailing_patch(messages: list[Message], info: dict[str, Any], left_out: Counter[str]) -> None:
    """The answer to the last `submit` is the patch: an end, and no observation."""
    if len(messages) < 2 or messages[-1].role not in ("tool", "user") or messages[-2].role != "assistant":
        return
    submission = info.get("submission")
    if isinstance(submission, str) and submission.strip():
        patch = "".join(submission.split())
        if patch and patch[:2000] in "".join(messages[-1].content.split()):
            messages.pop()
            left_out["trailing_patch"] += 1


def _model_name(config: Any) -> str | None:
    if isinstance(config, str):
        try:
            config = orjson.loads(config)
        except orjson.JSONDecodeError:
            return None
    for key in ("agent", "model", "name"):
        config = config.get(key) if isinstance(config, dict) else None
    return config if isinstance(config, str) else None
