"""The check that nothing was lost must itself notice what was."""

from __future__ import annotations

import copy

from tests.trajectories.make import mini_v1, mini_v2
from traceforge_core.trajectories.coverage import check_corpus, compare
from traceforge_core.trajectories.formats import detect


def test_everything_of_a_good_reading_is_found_or_explained(write):
    write("a.traj.json", mini_v1(note="a long enough remark", patch="diff --git a/long/file b/long/file"))
    folder = write("b.traj.json", mini_v2(note="another remark that is long enough"))
    results = check_corpus(folder)
    assert set(results) == {"mini-swe-agent-v1", "mini-swe-agent-v2"}
    for comparison in results.values():
        assert comparison.found > 0 and not comparison.unexplained


def test_a_lost_turn_reasoning_or_argument_is_noticed():
    value = mini_v2(note="an argument that is long enough")
    value["messages"][2]["content"] = "a thought that is long enough"
    value["messages"][2]["reasoning_content"] = "a reasoning that is long enough"
    form = detect(value)
    assert form is not None
    (whole,) = form.read(value)
    assert not compare(value, [whole]).unexplained
    for spoil in ("content", "reasoning", "actions"):
        broken = copy.deepcopy(whole)
        setattr(broken.messages[2], spoil, {"content": "", "reasoning": None, "actions": []}[spoil])
        broken.left_out = {}
        lost = compare(value, [broken]).unexplained
        assert sum(lost.values()) >= 1, spoil
        assert all(path.startswith("messages[]") for path in lost)


def test_a_message_that_the_reader_counted_explains_one_text_and_no_more():
    value = mini_v1(patch="diff --git a/long/file b/long/file")
    value["messages"][3]["content"] = "an observation that is long enough"
    form = detect(value)
    assert form is not None
    (trajectory,) = form.read(value)
    del trajectory.messages[3]
    value["info"]["submission"] = ""
    assert sum(compare(value, [trajectory]).unexplained.values()) == 1
