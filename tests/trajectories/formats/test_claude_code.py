"""Claude Code sessions: turns in several lines, sidechains, second tries, compactions, lines of no use."""

from __future__ import annotations

from typing import Any

from traceforge_core.trajectories.formats import detect
from traceforge_core.trajectories.model import Trajectory


def user(uuid: str, parent: str | None, content: Any, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": content}
    return {"type": "user", "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": message, **more}


def assistant(
    uuid: str, parent: str | None, block: dict[str, Any], turn: str | None = None, **more: Any
) -> dict[str, Any]:
    message = {"id": turn or uuid, "role": "assistant", "model": "claude-x", "content": [block]}
    return {"type": "assistant", "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": {**message, **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def result(call: str, words: str) -> list[dict[str, Any]]:
    return [{"type": "tool_result", "tool_use_id": call, "content": [text(words)]}]


def read(*lines: Any) -> list[Trajectory]:
    form = detect(list(lines), logs=True)
    assert form is not None and form.name == "claude-code"
    return list(form.read(list(lines)))


def said(trajectory: Trajectory) -> list[str]:
    return [f"{message.role}: {message.content}" for message in trajectory.messages]


def test_the_lines_of_one_turn_are_one_message_and_repeated_blocks_are_kept_once():
    use = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}}
    (trajectory,) = read(
        user("u1", None, "go"),
        assistant("a1", "u1", {"type": "thinking", "thinking": "hm", "signature": "x"}, "m1"),
        assistant("a2", "a1", text("I look"), "m1"),
        assistant("a3", "a2", text("I look around"), "m1"),
        assistant("a4", "a3", {**use, "input": {"command": "l"}}, "m1"),
        assistant("a5", "a4", use, "m1"),
        user("u2", "a5", result("t1", "x.py")),
    )
    assert said(trajectory) == ["user: go", "assistant: I look around", "tool: x.py"]
    turn = trajectory.messages[1]
    assert turn.reasoning == "hm" and [a.arguments for a in turn.actions] == [{"command": "ls"}]
    assert trajectory.messages[2].call_id == "t1" and trajectory.model == "claude-x"


def test_each_sidechain_is_a_trajectory_of_its_own():
    main, one, two = read(
        user("u1", None, "go"),
        user("s1", None, "sub one", isSidechain=True),
        assistant("a1", "u1", text("main answer")),
        assistant("b1", "s1", text("one answer")) | {"isSidechain": True},
        user("s2", None, "sub two", isSidechain=True),
        assistant("b2", "s2", text("two answer")) | {"isSidechain": True},
    )
    assert said(main) == ["user: go", "assistant: main answer"]
    assert said(one) == ["user: sub one", "assistant: one answer"]
    assert said(two) == ["user: sub two", "assistant: two answer"]
    assert len({main.run, one.run, two.run}) == 3


def test_a_second_try_is_a_branch_that_shares_its_beginning_and_does_not_teach_it_twice():
    first, second = read(
        user("u1", None, "go"),
        assistant("a1", "u1", text("first step")),
        user("u2", "a1", "do A"),
        assistant("a2", "u2", text("did A")),
        user("u3", "a1", "do B instead"),
        assistant("a3", "u3", text("did B")),
    )
    assert said(first) == ["user: go", "assistant: first step", "user: do A", "assistant: did A"]
    assert said(second) == ["user: go", "assistant: first step", "user: do B instead", "assistant: did B"]
    assert [m.trainable for m in second.messages if m.role == "assistant"] == [False, True]
    assert all(m.trainable for m in first.messages)


def test_answers_to_parallel_calls_are_no_branches_even_past_other_lines():
    call = [{"type": "tool_use", "id": f"t{i}", "name": "Read", "input": {"n": i}} for i in (1, 2)]
    (trajectory,) = read(
        user("u1", None, "go"),
        assistant("a1", "u1", call[0], "m"),
        assistant("a2", "a1", call[1], "m"),
        user("r1", "a1", result("t1", "one")),
        {"type": "system", "uuid": "x1", "parentUuid": "r1"},
        user("r2", "a2", result("t2", "two")),
        user("u2", "x1", "and now?"),
        assistant("a3", "u2", text("done")),
    )
    assert said(trajectory) == [
        "user: go",
        "assistant: ",
        "tool: one",
        "tool: two",
        "user: and now?",
        "assistant: done",
    ]
    assert len(trajectory.messages[1].actions) == 2


def test_what_follows_a_compaction_starts_anew():
    before, after = read(
        user("u1", None, "go"),
        assistant("a1", "u1", text("long work")),
        user("u2", None, "Summary of it", isCompactSummary=True),
        assistant("a2", "u2", text("going on")),
    )
    assert said(before) == ["user: go", "assistant: long work"]
    assert said(after) == ["user: Summary of it", "assistant: going on"]


def test_turns_that_no_model_wrote_and_junk_lines_are_left_out_and_counted():
    (trajectory,) = read(
        user("u1", None, "go"),
        assistant("a1", "u1", text("API Error"), model="<synthetic>"),
        "massive error",
        42,
        {"type": "summary", "summary": "x"},
        {"type": "user", "message": "error"},
        assistant("a2", "a1", text("real")),
    )
    assert said(trajectory) == ["user: go", "assistant: real"]
    assert trajectory.left_out == {
        "synthetic_turn": 1,
        "line_that_is_no_event": 2,
        "bookkeeping_event": 1,
        "turn_without_message": 1,
    }


def test_a_web_export_is_read():
    lines = [user("u1", None, "go"), assistant("a1", "u1", text("ok"))]
    (trajectory,) = read({"loglines": lines})
    assert said(trajectory) == ["user: go", "assistant: ok"]
