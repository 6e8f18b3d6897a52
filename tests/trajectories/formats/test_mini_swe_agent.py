"""mini-swe-agent's shapes: where its actions, reasoning and ends stand, and what is never learnt from."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trajectories.make import mini_v1, mini_v2
from traceforge_core.trajectories.formats import detect
from traceforge_core.trajectories.formats.protocol import Unreadable
from traceforge_core.trajectories.model import Trajectory


def read(value: Any) -> Trajectory:
    form = detect(value)
    assert form is not None
    (trajectory,) = form.read(value)
    return trajectory


def with_assistant(message: dict[str, Any]) -> dict[str, Any]:
    value = mini_v2(turns=1)
    value["messages"][2] = message
    return value


def test_a_v2_file_has_calls_observations_and_return_codes_and_no_exit_message():
    trajectory = read(mini_v2(turns=2))
    assert trajectory.format == "mini-swe-agent-v2"
    assert [m.role for m in trajectory.messages] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    action = trajectory.messages[2].actions[0]
    assert (action.name, action.arguments, action.call_id, action.in_text) == (
        "bash",
        {"command": "ls 0 "},
        "call_0",
        False,
    )
    assert [m.returncode for m in trajectory.messages if m.role == "tool"] == [0, 1]
    assert trajectory.left_out == {"exit_message": 1}
    assert trajectory.exit_status == "Submitted" and trajectory.model == "m/x"
    assert trajectory.tools[0]["function"]["name"] == "bash"


def test_a_v1_file_keeps_its_text_marks_its_format_error_and_drops_the_trailing_patch():
    trajectory = read(mini_v1())
    assert trajectory.format == "mini-swe-agent-v1"
    assert [m.role for m in trajectory.messages] == ["system", "user", *["assistant", "user"] * 2, "assistant"]
    assert trajectory.left_out == {"trailing_patch": 1}
    first, wrong, last = (trajectory.messages[i] for i in trajectory.turns)
    assert first.actions[0].arguments == {"command": "ls"} and first.actions[0].in_text
    assert "```bash\nls\n```" in first.content
    assert not wrong.actions and not wrong.trainable
    assert first.trainable and last.trainable
    assert trajectory.messages[3].returncode == 1
    assert trajectory.tools == []


def test_actions_are_taken_from_tool_calls_before_extra_functions_before_extra_commands():
    call = {"id": "c1", "type": "function", "function": {"name": "edit", "arguments": '{"path": "x"}'}}
    functions = [{"function": {"name": "view", "arguments": {"path": "y"}}, "id": "c2"}]
    commands = [{"command": "ls", "tool_call_id": "c3"}]
    message = {"role": "assistant", "content": "", "tool_calls": [call], "extra": {"actions": functions}}
    assert [a.name for a in read(with_assistant(message)).messages[2].actions] == ["edit"]
    message = {"role": "assistant", "content": "", "extra": {"actions": functions}}
    (action,) = read(with_assistant(message)).messages[2].actions
    assert (action.name, action.arguments, action.call_id) == ("view", {"path": "y"}, "c2")
    message = {"role": "assistant", "content": "", "extra": {"actions": commands}}
    (action,) = read(with_assistant(message)).messages[2].actions
    assert (action.name, action.arguments, action.call_id) == ("bash", {"command": "ls"}, "c3")


def test_text_mode_reads_its_own_fence():
    message = {
        "role": "assistant",
        "content": "Look.\n```mswea_bash_command\ncat x\n```",
        "extra": {"actions": [{"command": "cat x"}]},
    }
    (action,) = read(with_assistant(message)).messages[2].actions
    assert action.arguments == {"command": "cat x"} and action.in_text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        (None, {}),
        ("not json", {"input": "not json"}),
        ("[1]", {"input": "[1]"}),
    ],
)
def test_arguments_are_always_an_object_and_never_lost(arguments: Any, expected: dict[str, Any]):
    call = {"id": "c", "function": {"name": "t", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    turn = read(with_assistant(message)).messages[2]
    assert turn.actions[0].arguments == expected and turn.content == ""


def test_a_turn_of_the_responses_api_has_no_role_and_is_read_all_the_same():
    value = mini_v2(turns=1)
    value["messages"][2] = {
        "object": "response",
        "output": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I think."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Now ls."}]},
            {"type": "function_call", "call_id": "call_9", "name": "bash", "arguments": '{"command": "ls"}'},
        ],
        "extra": {"actions": [{"command": "ls", "tool_call_id": "call_9"}]},
    }
    value["messages"][3] = {
        "type": "function_call_output",
        "call_id": "call_9",
        "output": "<returncode>2</returncode>",
        "extra": {"returncode": 2},
    }
    trajectory = read(value)
    turn, answer = trajectory.messages[2:4]
    assert (turn.role, turn.reasoning, turn.content) == ("assistant", "I think.", "Now ls.")
    assert turn.actions[0].call_id == answer.call_id == "call_9" and len(turn.actions) == 1
    assert answer.role == "tool" and answer.returncode == 2


def test_reasoning_is_found_beside_the_content_in_provider_fields_and_in_the_raw_response():
    raw = {"choices": [{"message": {"role": "assistant", "content": "x", "reasoning": "deep"}}]}
    for message in (
        {"role": "assistant", "content": "x", "reasoning_content": "deep"},
        {"role": "assistant", "content": "x", "provider_specific_fields": {"reasoning_content": "deep"}},
        {"role": "assistant", "content": "x", "thinking_blocks": [{"type": "thinking", "thinking": "deep"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "deep"}, {"type": "text", "text": "x"}]},
        {"role": "assistant", "content": "<think>\ndeep\n</think>\n\nx"},
        {"role": "assistant", "content": "<think>deep</think>x", "reasoning_content": "deep"},
        {"role": "assistant", "content": "x", "extra": {"response": raw}},
    ):
        turn = read(with_assistant(message)).messages[2]
        assert (turn.reasoning, turn.content) == ("deep", "x"), message


def test_a_run_that_ends_with_repeated_format_errors_keeps_them_as_users_words():
    value = mini_v2(turns=1, exit_status="RepeatedFormatError")
    error = {"role": "user", "content": "Tool call error", "extra": {"interrupt_type": "FormatError"}}
    value["messages"][4:4] = [error, error]
    trajectory = read(value)
    assert [m.role for m in trajectory.messages][-3:] == ["tool", "user", "user"]
    assert all(trajectory.messages[i].trainable for i in trajectory.turns)


def test_an_empty_last_user_message_of_a_run_at_its_limit_is_left_out():
    value = mini_v1(patch="")
    value["info"]["exit_status"] = "LimitsExceeded"
    assert read(value).left_out == {"exit_message": 1}


def test_an_observation_at_the_end_of_a_killed_run_stays():
    value = mini_v1()
    value["messages"] = value["messages"][:4]
    value["info"] = {"config": value["info"]["config"]}
    assert read(value).messages[-1].content.startswith("<returncode>1")


def test_a_hostile_action_regex_is_never_run():
    value = mini_v1(note="a" * 60)
    value["info"]["config"]["agent"]["action_regex"] = r"(a+)+$"
    assert read(value).messages[2].actions[0].arguments == {"command": "ls"}


@pytest.mark.parametrize("entry", [7, "text", None, {"role": "wizard", "content": ""}, {"content": "no role"}])
def test_what_is_no_message_says_so(entry: Any):
    value = mini_v2()
    value["messages"].insert(2, entry)
    with pytest.raises(Unreadable, match="message"):
        read(value)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reward": 1}, "resolved"),
        ({"reward": 0.0}, "unresolved"),
        ({"reward": 0, "eval_error": "no docker"}, None),
        ({}, None),
    ],
)
def test_a_reward_that_a_trainer_adds_is_the_outcome_unless_the_evaluation_failed(fields: Any, expected: str | None):
    assert read(mini_v2() | fields).outcome == expected
