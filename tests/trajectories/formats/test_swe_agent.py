"""SWE-agent files: the history, or the steps where there is none; what is never learnt from."""

from __future__ import annotations

from typing import Any

from traceforge_core.trajectories.formats import detect
from traceforge_core.trajectories.model import Trajectory

INFO = {"exit_status": "submitted", "submission": "diff --git a b\n+x\n"}
STEP = {"action": "ls", "observation": "x.py", "response": "Look.\n```\nls\n```", "thought": "Look."}


def read(value: dict[str, Any]) -> Trajectory:
    form = detect(value)
    assert form is not None and form.name == "swe-agent"
    (trajectory,) = form.read(value)
    return trajectory


def test_demonstrations_and_cost_exits_are_never_learnt_from():
    history = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Here is a demonstration", "is_demo": True},
        {"role": "assistant", "content": "demo turn", "is_demo": True, "action": "ls"},
        {"role": "user", "content": [{"type": "text", "text": "the task"}]},
        {"role": "assistant", "content": "Look.\n```\nls\n```", "thought": "Look.", "action": "ls\n"},
        {"role": "user", "content": "x.py"},
        {"role": "assistant", "content": "Exit due to cost limit", "thought": "Exit", "action": "submit"},
    ]
    trajectory = read({"trajectory": [STEP], "history": history, "info": INFO})
    assert [m.trainable for m in trajectory.messages if m.role == "assistant"] == [False, True, False]
    turn = trajectory.messages[4]
    assert turn.reasoning is None and turn.actions[0].arguments == {"command": "ls"} and turn.actions[0].in_text
    assert trajectory.messages[3].content == "the task"


def test_tool_calls_and_plural_ids_are_read_and_the_submitted_patch_is_no_observation():
    call = {"id": "c1", "type": "function", "function": {"name": "submit", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "task"},
        {"role": "assistant", "content": "", "tool_calls": [call], "thought": "", "action": "submit"},
        {"role": "tool", "content": [{"type": "text", "text": "Review:\n"}], "tool_call_ids": ["c1"]},
        {"role": "assistant", "content": "again", "tool_calls": [call]},
        {"role": "tool", "content": "OBSERVATION:\r\ndiff --git a b\r\n+x", "tool_call_ids": ["c1"]},
    ]
    config = {"agent": {"model": {"name": "claude", "api_key": "x"}}}
    trajectory = read({"trajectory": [STEP], "history": history, "info": INFO, "replay_config": config})
    assert [m.role for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[2].call_id == "c1" and trajectory.model == "claude"
    assert trajectory.left_out == {"trailing_patch": 1}


def test_a_file_without_history_is_put_together_from_the_last_query_or_the_steps():
    query = [{"role": "system", "content": "S"}, {"role": "user", "content": "task"}]
    trajectory = read({"trajectory": [{**STEP, "query": query}], "info": INFO})
    assert [m.role for m in trajectory.messages] == ["system", "user", "assistant"]
    trajectory = read({"trajectory": [STEP, {**STEP, "observation": "y"}], "history": [], "info": INFO})
    assert [m.content for m in trajectory.messages] == [STEP["response"], "x.py", STEP["response"], "y"]
