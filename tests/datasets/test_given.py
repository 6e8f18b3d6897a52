"""Ready pairs from a file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from traceforge_core.datasets.given import given_candidates
from traceforge_core.datasets.pairs import Candidate
from traceforge_core.errors import TraceForgeError
from traceforge_core.trajectories.model import Message


def read(tmp_path: Path, *lines: Any) -> tuple[list[Candidate], dict[str, int]]:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    dropped: Counter[str] = Counter()
    return list(given_candidates(file, dropped)), dict(dropped)


def test_messages_and_plain_strings_are_both_understood(tmp_path: Path) -> None:
    user, good, bad = (
        {"role": role, "content": text} for role, text in (("user", "u"), ("assistant", "g"), ("assistant", "b"))
    )
    found, dropped = read(
        tmp_path,
        {"prompt": [user], "chosen": [good], "rejected": [bad], "case": "mine", "id": "first", "tools": "[1]"},
        {"prompt": "u", "chosen": "g", "rejected": "b"},
        {"prompt": "u", "chosen": "other", "rejected": "b"},
    )
    assert dropped == {}
    for candidate in found[:2]:
        run = candidate.chosen.load()
        assert run.messages[: candidate.chosen.prompt_stop] == [Message("user", "u")]
        assert run.messages[candidate.chosen.start :] == [Message("assistant", "g")]
        assert candidate.rejected.load().messages[1:] == [Message("assistant", "b")]
    assert [found[0].case, found[0].chosen.trajectory_id] == ["mine", "first/chosen"]
    assert found[0].chosen.load().tools == [1]
    assert found[1].case == found[2].case  # one prompt is one case, so the cap and the split see it as one


def test_a_completion_is_cut_behind_its_last_turn_of_the_model(tmp_path: Path) -> None:
    turn, answer = {"role": "assistant", "content": "a"}, {"role": "tool", "content": "o"}
    (candidate,), _ = read(tmp_path, {"prompt": "u", "chosen": [turn, answer, turn, answer], "rejected": "b"})
    assert [message.role for message in candidate.chosen.load().messages] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(
    "line",
    [
        "{torn",
        "[1]",
        "7",
        '{"prompt": "u", "chosen": "a"}',
        '{"prompt": "u", "chosen": "", "rejected": "b"}',
        '{"prompt": "u", "chosen": [{"role": "user", "content": "x"}], "rejected": "b"}',
        '{"prompt": "u", "chosen": [{"role": "tool", "content": "x"}], "rejected": "b"}',
        '{"prompt": {"role": "user"}, "chosen": "a", "rejected": "b"}',
        '{"prompt": "u", "chosen": [{"role": "robot"}], "rejected": "b"}',
        '{"prompt": "u", "chosen": "a", "rejected": "b", "tools": "{torn"}',
    ],
)
def test_lines_that_cannot_be_read_are_counted_and_the_rest_is_kept(tmp_path: Path, line: str) -> None:
    good = {"prompt": "u", "chosen": "a", "rejected": "b"}
    found, dropped = read(tmp_path, good, line, "", good)
    assert len(found) == 2
    assert dropped == {"given: unreadable line": 1}


def test_a_file_that_is_not_there_says_which_setting_names_it(tmp_path: Path) -> None:
    with pytest.raises(TraceForgeError, match=r"datasets\.preference\.given"):
        list(given_candidates(tmp_path / "none.jsonl", Counter()))
