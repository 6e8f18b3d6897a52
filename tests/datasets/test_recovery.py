"""Which failed turn goes with which later one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from traceforge_core.datasets.recovery import recoveries, stated_returncode
from traceforge_core.trajectories.model import Action, Message, Trajectory

Make = Callable[..., Trajectory]


def positions(make_run: Make, *steps: tuple[str, int], within: int = 3) -> list[tuple[int, int]]:
    """Recoveries as step numbers."""
    found = recoveries(make_run("c", "r", list(steps)).messages, within)
    return [((failed - 2) // 2, (worked - 2) // 2) for failed, worked in found]


def test_a_failed_command_goes_with_the_next_of_its_kind_that_worked(make_run: Make) -> None:
    assert positions(make_run, ("sed -i s/a/b/ x", 1), ("cat x", 0), ("sed -i s/a/c/ x", 0)) == [(0, 2)]
    assert positions(make_run, ("cd src && pytest x", 2), ("cd lib; pytest y | tail", 0)) == [(0, 1)]


def test_every_failure_of_a_row_goes_with_the_one_that_worked(make_run: Make) -> None:
    assert positions(make_run, ("sed a", 1), ("sed b", 1), ("sed c", 0)) == [(0, 2), (1, 2)]


def test_another_kind_of_attempt_is_no_recovery(make_run: Make) -> None:
    assert positions(make_run, ("pytest x", 1), ("cat x", 0), ("echo pytest x", 0)) == []
    assert positions(make_run, ("cd nowhere", 1), ("cd src", 0)) == []


def test_the_same_call_again_is_no_recovery(make_run: Make) -> None:
    assert positions(make_run, ("pytest x", 1), ("sed -i s/a/b/ x", 0), ("pytest x", 0)) == []


def test_a_recovery_that_comes_too_late_is_none(make_run: Make) -> None:
    late = [("sed a", 1), ("cat a", 0), ("cat b", 0), ("cat c", 0), ("sed b", 0)]
    assert positions(make_run, *late) == []
    assert positions(make_run, *late, within=4) == [(0, 4)]


def test_turns_that_must_not_be_learned_take_no_part(make_run: Make) -> None:
    messages = make_run("c", "r", [("sed a", 1), ("sed b", 0)]).messages
    assert recoveries(messages, 3) == [(2, 4)]
    for position in (2, 4):
        messages[position].trainable = False
        assert recoveries(messages, 3) == []
        messages[position].trainable = True


def test_programs_in_quotes_and_here_documents_do_not_count(make_run: Make) -> None:
    assert positions(make_run, ("grep 'a; sed b' x", 1), ("sed b", 0)) == []
    assert positions(make_run, ("python - <<'E'\nsed = 1\nE", 1), ("sed b", 0)) == []
    assert positions(make_run, ("FOO=1 sudo /usr/bin/sed a", 1), ("sed b", 0)) == [(0, 1)]


def test_tools_without_a_command_are_compared_by_name() -> None:
    def turn(tool: str, path: str, code: int) -> list[Message]:
        call = Action(tool, {"path": path}, "c")
        return [Message("assistant", "", actions=[call]), Message("tool", "", returncode=code)]

    head = [Message("user", "task")]
    assert recoveries(head + turn("open", "a", 1) + turn("open", "b", 0), 3) == [(1, 3)]
    assert recoveries(head + turn("open", "a", 1) + turn("close", "b", 0), 3) == []


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("<returncode>1</returncode>\n<output>\n</output>", 1),
        ("<returncode>-1</returncode>", -1),
        ("ok\n[The command completed with exit code 127.]", 127),
        ("[Command finished with exit code 0]", 0),
        ("Exit code 2\ncat: x", 2),
        ("output (exit code: 3)\n", 3),
        ("the text <returncode>1</returncode> is quoted", None),
        ("fine", None),
    ],
)
def test_return_codes_are_read_out_of_known_forms_of_observations(text: str, code: int | None) -> None:
    assert stated_returncode(Message("tool", text)) == code
    assert stated_returncode(Message("tool", text, returncode=9)) == 9
