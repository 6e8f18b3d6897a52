"""Rows of data sets: chat, nebius, ShareGPT, ATIF, completion logs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from traceforge_core.trajectories.formats import detect
from traceforge_core.trajectories.model import Trajectory

TURNS = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "ok"}]


def read(value: dict[str, Any]) -> Trajectory:
    form = detect(value)
    assert form is not None
    return next(iter(form.read(value)))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"resolved": True}, "resolved"),
        ({"resolved": 0}, "unresolved"),
        ({"target": False}, "unresolved"),
        ({"verified": True}, "resolved"),
        ({"reward": 1.0}, "resolved"),
        ({"reward": 0.4}, None),
        ({"resolved": None}, None),
        ({"test_result": {"report": {"resolved": True}}}, "resolved"),
        ({}, None),
    ],
)
def test_a_rows_own_field_is_its_outcome(fields: dict[str, Any], expected: str | None):
    trajectory = read({"messages": TURNS, "instance_id": "a__b-1", **fields})
    assert trajectory.outcome == expected and (trajectory.outcome_source is None) == (expected is None)


def test_messages_and_tools_may_be_text_and_keys_padded_with_null():
    padded = [{**turn, "tool_calls": None, "function_call": None, "name": None, "tool_call_id": None} for turn in TURNS]
    tools = json.dumps([{"type": "function", "function": {"name": "t", "description": None, "parameters": {}}}])
    trajectory = read(
        {"messages": json.dumps(padded), "tools": tools, "instance_id": "python__mypy-15976_0", "run_id": "r"}
    )
    assert [m.content for m in trajectory.messages] == ["go", "ok"]
    assert trajectory.tools == [{"type": "function", "function": {"name": "t", "parameters": {}}}]
    assert (trajectory.format, trajectory.case, trajectory.run) == ("hf-rows", "python__mypy-15976", "r_0")


def test_xml_calls_in_the_text_are_actions_too_even_unfinished():
    body = "<function=bash>\n<parameter=command>\nls -la\n</parameter>\n</function>"
    for text in (body, body.removesuffix("</function>")):
        turn = read({"messages": [TURNS[0], {"role": "assistant", "content": f"Look.\n{text}"}]}).messages[1]
        assert [(a.name, a.arguments, a.in_text) for a in turn.actions] == [("bash", {"command": "ls -la"}, True)]
        assert text in turn.content


def test_turns_that_a_row_masks_are_not_learnt():
    turns = [TURNS[0], {**TURNS[1], "weight": 0}, TURNS[0], TURNS[1]]
    assert [m.trainable for m in read({"messages": turns}).messages] == [True, False, True, True]
    steps = [
        {"role": "system", "text": None, "system_prompt": "S", "mask": False},
        {"role": "ai", "text": "x", "mask": False},
    ]
    trajectory = read({"trajectory": steps, "instance_id": "a__b-1_17", "target": True, "eval_logs": "hidden"})
    assert trajectory.format == "nebius-swe-agent" and trajectory.messages[0].content == "S"
    assert [m.trainable for m in trajectory.messages] == [True, False]
    assert (trajectory.case, trajectory.run, trajectory.left_out) == ("a__b-1", "17", {"hidden_test_log": 1})


def test_sharegpt_calls_as_json_become_actions():
    trajectory = read(
        {
            "conversations": [
                {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "seen"},
                {"from": "gpt", "value": "bye"},
            ],
            "system": "S",
            "tools": '[{"name": "f"}]',
        }
    )
    assert [m.role for m in trajectory.messages] == ["system", "assistant", "tool", "assistant"]
    assert trajectory.messages[1].actions[0].arguments == {"a": 1} and trajectory.messages[1].content == ""
    assert trajectory.tools == [{"type": "function", "function": {"name": "f"}}]


def test_atif_observations_follow_their_step_and_copies_and_programs_are_not_learnt():
    call = {"tool_call_id": "c1", "function_name": "f", "arguments": {"a": 1}}
    step = {"source": "agent", "message": [{"type": "text", "text": "do"}], "tool_calls": [call]}
    step["observation"] = {"results": [{"source_call_id": "c1", "content": [{"type": "text", "text": "seen"}]}]}
    inner = {"schema_version": "ATIF-v1.6", "agent": {}, "steps": [{"step_id": 1, "source": "user", "message": "sub"}]}
    value = {
        "schema_version": "ATIF-v1.6",
        "agent": {"model_name": "m"},
        "steps": [
            {"step_id": 1, "source": "system", "message": "S"},
            {"step_id": 2, "source": "system", "message": "later"},
            {"step_id": 3, **step, "reasoning_content": "why", "is_copied_context": True},
            {"step_id": 4, **step, "llm_call_count": 0},
            {"step_id": 5, **step},
        ],
        "subagent_trajectories": [inner],
    }
    form = detect(value)
    assert form is not None
    main, sub = form.read(value)
    assert [m.role for m in main.messages] == ["system", "user", *["assistant", "tool"] * 3]
    assert [main.messages[i].trainable for i in main.turns] == [False, False, True]
    assert (main.messages[2].reasoning, main.messages[2].content, main.messages[3].call_id) == ("why", "do", "c1")
    assert (sub.run, sub.messages[0].content) == ("subagent-1", "sub")


def test_images_are_counted_and_not_shown():
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    trajectory = read({"messages": [{"role": "user", "content": parts}, TURNS[1]]})
    assert trajectory.messages[0].content == "see" and trajectory.left_out == {"part_that_is_not_text": 1}
