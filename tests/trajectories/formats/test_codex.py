"""Codex rollouts, new and old: turns, answers, instructions, compactions."""

from __future__ import annotations

from typing import Any

from traceforge_core.trajectories.formats import detect
from traceforge_core.trajectories.model import Trajectory

META = {"id": "x", "instructions": "Be brief."}
ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I plan."}], "encrypted_content": "gAAA"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
    {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "c1"},
    {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin", "call_id": "c2"},
    {"type": "function_call_output", "call_id": "c1", "output": '{"output": "x.py", "metadata": {"exit_code": 3}}'},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "Exit code: 1\nno"},
    {"type": "reasoning", "summary": [], "encrypted_content": "gBBB"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]},
]


def read(lines: list[Any]) -> list[Trajectory]:
    form = detect(lines, logs=True)
    assert form is not None and form.name == "codex-rollout"
    return list(form.read(lines))


def wrapped(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"timestamp": "t", "type": "response_item", "payload": item} for item in items]


def check(trajectory: Trajectory) -> None:
    assert [m.role for m in trajectory.messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert trajectory.messages[0].content == "Be brief."
    turn = trajectory.messages[2]
    assert (turn.reasoning, turn.content) == ("I plan.", "Looking.")
    assert [(a.name, a.arguments, a.call_id) for a in turn.actions] == [
        ("shell", {"command": ["ls"]}, "c1"),
        ("apply_patch", {"input": "*** Begin"}, "c2"),
    ]
    assert [(m.content, m.returncode) for m in trajectory.messages[3:5]] == [("x.py", 3), ("Exit code: 1\nno", 1)]
    assert trajectory.left_out["encrypted_reasoning"] == 1


def test_new_rollouts_wrap_their_items():
    event = {"type": "event_msg", "payload": {"type": "agent_message", "message": "Looking."}}
    context = {"type": "turn_context", "payload": {"model": "gpt-x"}}
    (trajectory,) = read([{"type": "session_meta", "payload": META}, context, event, *wrapped(*ITEMS)])
    check(trajectory)
    assert trajectory.model == "gpt-x" and trajectory.left_out["interface_event"] == 1


def test_old_rollouts_do_not():
    (trajectory,) = read([META | {"timestamp": "t"}, {"record_type": "state"}, *ITEMS, {"record_type": "state"}])
    check(trajectory)
    assert trajectory.left_out["bookkeeping_event"] == 2


def test_instructions_that_a_message_repeats_are_not_said_twice():
    first = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "<user_instructions>\nBe brief.\n</user_instructions>"}],
    }
    (trajectory,) = read([{"type": "session_meta", "payload": META}, *wrapped(first, *ITEMS)])
    assert [m.role for m in trajectory.messages][:3] == ["user", "user", "assistant"]


def test_a_compaction_starts_a_new_trajectory_whose_copied_turns_are_not_learnt_again():
    compacted = {"type": "compacted", "payload": {"message": "", "replacement_history": ITEMS[:3]}}
    before, after = read([*wrapped(*ITEMS), compacted, *wrapped(ITEMS[-1] | {"role": "user"}, ITEMS[-1])])
    assert [m.content for m in before.messages][-1] == "Done."
    assert [m.role for m in after.messages] == ["user", "assistant", "user", "assistant"]
    assert [m.trainable for m in after.messages if m.role == "assistant"] == [False, True]
