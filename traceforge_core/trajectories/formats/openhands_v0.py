"""OpenHands V0: a list of events, alone or as the `history` of an `output.jsonl` row.

An assistant turn is the model's response that an action carries; the actions of parallel calls, and their observations,
repeat the same response, which is read once. Older files and the resolver's have no responses: the turn is then the
action's thought and arguments. Events that only keep the books (state changes, recalls) are counted as left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from traceforge_core.trajectories.formats.chat import chat_message, dump, text_of
from traceforge_core.trajectories.formats.protocol import Unreadable
from traceforge_core.trajectories.model import Action, Message, Trajectory
from traceforge_core.trajectories.outcome_files import as_label

BOOKKEEPING = {"null", "agent_state_changed", "change_agent_state", "recall", "condensation", "condensation_request"}
# Fields of an action that say how it was handled and not what the model asked for.
_HANDLING = {
    "action",
    "action_risk",
    "blocking",
    "cause",
    "confirmation_state",
    "hidden",
    "id",
    "impl_source",
    "is_confirmed",
    "is_input",
    "keep_prompt",
    "kernel_init_code",
    "message",
    "security_risk",
    "source",
    "thought",
    "timeout",
    "timestamp",
    "tool_call_metadata",
    "llm_metrics",
    "translated_ipython_code",
    "wait_for_response",
}


class OpenHandsEvents:
    """A list of events."""

    name = "openhands-v0"
    is_log = True

    def matches(self, value: Any) -> bool:
        return isinstance(value, list) and any(_is_event(event) for event in value[:5])

    def read(self, value: Any) -> Iterator[Trajectory]:
        yield read_events(value, self.name)


class OpenHandsOutput:
    """One row of `output.jsonl`: the events under `history`, the result beside them."""

    name = "openhands-output"
    is_log = False

    def matches(self, value: Any) -> bool:
        if not isinstance(value, dict) or not isinstance(value.get("history"), list):
            return False
        return any(_is_event(event) for event in _flat(value["history"][:5]))

    def read(self, value: Any) -> Iterator[Trajectory]:
        trajectory = read_events(_flat(value["history"]), self.name)
        trajectory.case = _case(value)
        error = value.get("error")
        if isinstance(error, str) and error:
            trajectory.exit_status = error[:200]
        result = value.get("test_result")
        report = result.get("report") if isinstance(result, dict) else value.get("report")
        if isinstance(report, dict) and (label := as_label(report.get("resolved"))):
            trajectory.outcome, trajectory.outcome_source = label, "test_result.report.resolved"
        metadata = value.get("metadata")
        config = metadata.get("llm_config") if isinstance(metadata, dict) else None
        if isinstance(config, dict) and isinstance(config.get("model"), str):
            trajectory.model = config["model"]
        if isinstance(result, dict) and result.get("test_output"):
            trajectory.left_out["hidden_test_log"] = 1
        yield trajectory


def read_events(events: list[Any], name: str) -> Trajectory:
    """A trajectory from events. Raises Unreadable where there is none among them."""
    left_out: Counter[str] = Counter()
    trajectory = Trajectory("", "", "", name, "", [])
    turns: dict[str, Message] = {}
    for event in events:
        if not isinstance(event, dict):
            left_out["line_that_is_no_event"] += 1
        elif "observation" in event:
            _add_observation(trajectory, event, left_out)
        elif "action" in event:
            _add_action(trajectory, event, turns, left_out)
        else:
            left_out["bookkeeping_event"] += 1
    trajectory.left_out = dict(left_out)
    return trajectory


def _add_observation(trajectory: Trajectory, event: dict[str, Any], left_out: Counter[str]) -> None:
    if event["observation"] in BOOKKEEPING:
        left_out["bookkeeping_event"] += 1
        return
    message = Message("tool", text_of(event.get("content"), left_out))
    metadata = event.get("tool_call_metadata")
    if isinstance(metadata, dict) and isinstance(metadata.get("tool_call_id"), str):
        message.call_id = metadata["tool_call_id"]
    elif isinstance(event.get("cause"), int):
        message.call_id = str(event["cause"])
    extras = event.get("extras")
    for place in (event, extras, extras.get("metadata") if isinstance(extras, dict) else None):
        code = place.get("exit_code") if isinstance(place, dict) else None
        if isinstance(code, int) and not isinstance(code, bool):
            message.returncode = code
            break
    trajectory.messages.append(message)


def _add_action(
    trajectory: Trajectory, event: dict[str, Any], turns: dict[str, Message], left_out: Counter[str]
) -> None:
    kind = event["action"]
    if kind in BOOKKEEPING:
        left_out["bookkeeping_event"] += 1
        return
    args = event["args"] if isinstance(event.get("args"), dict) else event
    if kind == "system":
        trajectory.messages.append(Message("system", text_of(args.get("content"), left_out)))
        if isinstance(args.get("tools"), list):
            trajectory.tools = [tool for tool in args["tools"] if isinstance(tool, dict)]
        return
    if kind == "message" and _is_from_user(trajectory, event):
        trajectory.messages.append(Message("user", text_of(args.get("content"), left_out)))
        return
    metadata = event.get("tool_call_metadata")
    response = metadata.get("model_response") if isinstance(metadata, dict) else None
    turn = _turn_of_response(response, turns, left_out)
    if turn is not None:
        if isinstance(response, dict) and isinstance(response.get("model"), str):
            trajectory.model = response["model"]
        if not any(turn is message for message in trajectory.messages):
            trajectory.messages.append(turn)
        return
    if kind == "message":
        trajectory.messages.append(Message("assistant", text_of(args.get("content"), left_out)))
        return
    thought = args.get("thought")
    turn = Message("assistant", text_of(thought, left_out))
    arguments = {key: item for key, item in args.items() if key not in _HANDLING}
    number = event.get("id")
    turn.actions = [Action(str(kind), arguments, str(number) if isinstance(number, int) else None)]
    trajectory.messages.append(turn)


def _turn_of_response(response: Any, turns: dict[str, Message], left_out: Counter[str]) -> Message | None:
    """The assistant turn of a model response; the same one for every event that carries that response."""
    choices = response.get("choices") if isinstance(response, dict) else None
    raw = choices[0].get("message") if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
    if not isinstance(raw, dict):
        return None
    key = response.get("id") if isinstance(response.get("id"), str) else dump(raw)
    if key not in turns:
        turns[key] = chat_message({**raw, "role": "assistant"}, left_out)
    return turns[key]


def _is_from_user(trajectory: Trajectory, event: dict[str, Any]) -> bool:
    """Who sent a message. Flat events do not say: the first is the user's, and so is one that answers the agent's."""
    source = event.get("source")
    if source in ("user", "agent", "environment"):
        return bool(source != "agent")
    if not trajectory.turns:
        return True
    last = trajectory.messages[-1]
    return last.role == "assistant" and not last.actions


def _is_event(event: Any) -> bool:
    if not isinstance(event, dict) or "kind" in event or "role" in event:
        return False
    named = isinstance(event.get("action"), str) or isinstance(event.get("observation"), str)
    return named and any(key in event for key in ("source", "args", "content", "thought", "extras"))


def _flat(history: list[Any]) -> list[Any]:
    """Old versions pair each action with its observation."""
    flat: list[Any] = []
    for item in history:
        flat.extend(item) if isinstance(item, list) else flat.append(item)
    return flat


def _case(row: dict[str, Any]) -> str:
    if isinstance(row.get("instance_id"), str):
        case: str = row["instance_id"]
        return case
    issue = row.get("issue")
    if isinstance(issue, dict) and {"owner", "repo", "number"} <= issue.keys():
        return f"{issue['owner']}__{issue['repo']}-{issue['number']}"
    if not any(isinstance(event, dict) for event in _flat(row["history"])):
        raise Unreadable("no_messages", "a history without events")
    return ""
