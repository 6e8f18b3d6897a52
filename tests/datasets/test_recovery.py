"""Which failed turn goes with which later one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from traceforge_core.datasets.pairs import survey
from traceforge_core.datasets.recovery import recoveries, refers_to_unseen, stated_returncode
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


@pytest.mark.parametrize(
    ("words", "call", "refers"),
    [
        ("Let me list the folder.", "ls -a", False),
        ("The earlier command failed.", "ls -a", True),
        ("That didn't work, so I look into the folder.", "ls -a", True),
        ("Let me try again.", "ls -a", True),
        ("The sed expression failed.", "ls -a", False),  # of what the prompt shows, for all a rule can tell
        ("I mend missing_name.", "ls -a", True),  # said by the observation of the failure, and nowhere before it
        ("I mend it.", "pip install widgets", True),  # in quotes there
        ("I mend it.", "ls src/given_name.py", False),  # the task names it
        ("I mend it.", "ls -l own_name.py", False),  # the failed turn names it too
        ("```bash\necho again\n```", "ls", False),  # a command is no look back
    ],
)
def test_a_turn_that_refers_to_the_failure_is_told_from_one_that_does_not(
    make_run: Make, words: str, call: str, refers: bool
) -> None:
    messages = make_run("c", "r", [("ls own_name.py", 1), (call, 0)], task="Mend given_name.py").messages
    messages[3].content = "<returncode>1</returncode> missing_name in given_name.py and own_name.py, no 'widgets'"
    messages[4].content, messages[4].reasoning = words, None
    assert recoveries(messages, 3) == ([] if call.startswith("pip") else [(2, 4)])
    assert refers_to_unseen(messages, 2, 4) is refers
    messages[4].content, messages[4].reasoning = "", words
    assert refers_to_unseen(messages, 2, 4) is refers


def test_recoveries_that_refer_to_the_failure_make_no_candidate_and_are_counted(make_run: Make) -> None:
    run = make_run("c", "r", [("sed a", 1), ("sed b", 0), ("cat a", 1), ("cat b", 0)])
    run.messages[4].content = "The last command failed, so I take the other file."
    surveyed = survey(0, run, 3, dict.fromkeys(run.turns, 0))
    assert [(failed, worked) for failed, worked, *_ in surveyed.recoveries] == [(6, 8)]
    assert surveyed.refused_recoveries == 1


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
