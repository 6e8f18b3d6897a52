"""OpenHands V0, its output rows, and the SDK: one response is one turn, bookkeeping is left out."""

from __future__ import annotations

from typing import Any

from traceforge_core.trajectories.formats import detect
from traceforge_core.trajectories.model import Trajectory


def response(name: str, *calls: str) -> dict[str, Any]:
    tool_calls = [
        {"id": call, "type": "function", "function": {"name": "bash", "arguments": '{"n": 1}'}} for call in calls
    ]
    message = {"role": "assistant", "content": f"I do {name}", "tool_calls": tool_calls}
    return {"id": name, "model": "m/x", "choices": [{"message": message}]}


def action(number: int, answer: dict[str, Any], call: str) -> dict[str, Any]:
    metadata = {"function_name": "bash", "tool_call_id": call, "model_response": answer}
    return {"id": number, "source": "agent", "action": "run", "args": {"command": "ls"}, "tool_call_metadata": metadata}


def observation(number: int, cause: int, answer: dict[str, Any], call: str) -> dict[str, Any]:
    event = action(number, answer, call) | {"observation": "run", "content": f"saw {call}", "cause": cause}
    event["extras"] = {"metadata": {"exit_code": 5}}
    del event["action"]
    return event


BOTH = response("r1", "c1", "c2")
EVENTS = [
    {"id": 0, "source": "agent", "action": "system", "args": {"content": "S", "tools": [{"type": "function"}]}},
    {"id": 1, "source": "user", "action": "message", "args": {"content": "Do it"}},
    {"id": 2, "source": "user", "action": "recall", "args": {"query": "x"}},
    {"id": 3, "source": "environment", "observation": "agent_state_changed", "content": "", "extras": {}},
    action(5, BOTH, "c1"),
    action(6, BOTH, "c2"),
    observation(7, 5, BOTH, "c1"),
    observation(8, 6, BOTH, "c2"),
    {"id": 9, "source": "agent", "action": "message", "args": {"content": "All done."}},
]


def read(value: Any, logs: bool = False) -> Trajectory:
    form = detect(value, logs=logs)
    assert form is not None
    (trajectory,) = form.read(value)
    return trajectory


def test_parallel_calls_of_one_response_are_one_turn():
    trajectory = read(EVENTS, logs=True)
    assert trajectory.format == "openhands-v0"
    assert [m.role for m in trajectory.messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert [a.call_id for a in trajectory.messages[2].actions] == ["c1", "c2"]
    assert [(m.content, m.call_id, m.returncode) for m in trajectory.messages[3:5]] == [
        ("saw c1", "c1", 5),
        ("saw c2", "c2", 5),
    ]
    assert trajectory.model == "m/x" and trajectory.tools == [{"type": "function"}]
    assert trajectory.left_out == {"bookkeeping_event": 2}


def test_an_output_row_brings_case_model_error_and_outcome_and_hides_the_tests():
    row = {
        "instance_id": "a__b-1",
        "history": [EVENTS[1:3], EVENTS[4:7]],
        "metadata": {"llm_config": {"model": "m/y", "api_key": "**"}},
        "test_result": {"report": {"resolved": False}, "test_output": "FAILED test_secret", "git_patch": "x"},
        "error": "Agent reached maximum iteration",
    }
    trajectory = read(row)
    assert (trajectory.format, trajectory.case, trajectory.model) == ("openhands-output", "a__b-1", "m/y")
    assert (trajectory.outcome, trajectory.exit_status) == ("unresolved", "Agent reached maximum iteration")
    assert trajectory.left_out["hidden_test_log"] == 1
    assert not any("test_secret" in m.content for m in trajectory.messages)


def test_flat_events_without_responses_become_thought_and_arguments():
    row = {
        "issue": {"owner": "o", "repo": "r", "number": 7},
        "history": [
            {"action": "message", "content": "Fix it", "wait_for_response": False},
            {"action": "run", "command": "ls", "thought": "Look", "keep_prompt": True, "is_confirmed": "confirmed"},
            {"observation": "run", "content": "x.py", "command": "ls", "exit_code": 0},
            {"action": "message", "content": "Done?", "wait_for_response": False},
            {"action": "message", "content": "Go on", "wait_for_response": False},
            {"action": "finish", "outputs": {}, "thought": "Bye"},
        ],
    }
    trajectory = read(row)
    assert trajectory.case == "o__r-7"
    assert [m.role for m in trajectory.messages] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    turn = trajectory.messages[1]
    assert (turn.content, turn.actions[0].name, turn.actions[0].arguments) == ("Look", "run", {"command": "ls"})
    assert trajectory.messages[2].returncode == 0


def test_sdk_events_keep_reasoning_once():
    call = {"id": "c1", "name": "terminal", "arguments": '{"command": "ls"}'}
    trajectory = read(
        [
            {"kind": "MessageEvent", "id": "0", "source": "user", "llm_message": {"role": "user", "content": "go"}},
            {
                "kind": "ActionEvent",
                "id": "1",
                "source": "agent",
                "thought": [{"type": "text", "text": "<think>Deep.</think>\n\nNow."}],
                "reasoning_content": "Deep.",
                "tool_call": call,
                "llm_response_id": "r",
            },
            {"kind": "AgentErrorEvent", "id": "2", "source": "agent", "error": "No such tool", "tool_call_id": "c1"},
            {"kind": "CondensationEvent", "id": "3", "source": "environment"},
        ],
        logs=True,
    )
    turn, answer = trajectory.messages[1:]
    assert (turn.reasoning, turn.content) == ("Deep.", "Now.")
    assert (answer.role, answer.content, answer.call_id) == ("tool", "No such tool", "c1")
    assert trajectory.left_out == {"bookkeeping_event": 1}
