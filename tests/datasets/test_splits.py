"""Which cases are held out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceforge_core.config import SplitConfig
from traceforge_core.datasets.splits import repository_of, split_cases

cases = st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=30)


@given(cases=cases, held_out=st.floats(0, 0.99), seed=st.integers(0, 5))
def test_a_case_has_one_side_and_train_is_never_empty(cases: set[str], held_out: float, seed: int) -> None:
    config = SplitConfig(held_out=held_out, seed=seed)
    side = split_cases(sorted(cases), config)
    again = split_cases(sorted(cases, reverse=True), config)
    assert [side(case) for case in cases] == [again(case) for case in cases]
    held = sum(side(case) == "held_out" for case in cases)
    assert held < len(cases)
    assert held == 0 if held_out == 0 or len(cases) == 1 else held >= 1
    assert abs(held - held_out * len(cases)) <= 1


def test_the_seed_changes_who_is_held_out() -> None:
    names = [f"case-{number}" for number in range(40)]
    held = set()
    for seed in range(5):
        side = split_cases(names, SplitConfig(held_out=0.25, seed=seed))
        held.add(tuple(name for name in names if side(name) == "held_out"))
    assert len(held) == 5
    assert {len(some) for some in held} == {10}


def test_by_repository_keeps_all_cases_of_one_together() -> None:
    names = [f"{owner}__repo-{n}" for owner in "abcdef" for n in range(5)]
    side = split_cases(names, SplitConfig(held_out=0.3, by="repository"))
    for owner in "abcdef":
        assert len({side(name) for name in names if name.startswith(owner)}) == 1
    assert {side(name) for name in names} == {"train", "held_out"}


def test_cases_that_are_alike_come_to_one_side_whatever_the_order_of_the_pairs() -> None:
    names = [f"case-{number}" for number in range(40)]
    alike = [(f"case-{number}", f"case-{number + 10}") for number in range(30)]
    sides = []
    for pairs in (alike, [(second, first) for first, second in reversed(alike)]):
        side = split_cases(names, SplitConfig(held_out=0.3), pairs)
        for number in range(10):
            assert len({side(name) for name in names[number::10]}) == 1
        assert sum(side(name) == "held_out" for name in names) == 3 * 4
        sides.append([side(name) for name in names])
    assert sides[0] == sides[1]


@pytest.mark.parametrize("seed", range(6))
def test_a_group_with_most_of_the_cases_is_trained_on(seed: int) -> None:
    names = [f"fork-{number}" for number in range(9)] + ["other"]
    side = split_cases(names, SplitConfig(seed=seed), alike=[("fork-0", fork) for fork in names[1:9]])
    assert [name for name in names if side(name) == "held_out"] == ["other"]


def test_many_cases_that_are_alike_are_not_held_out_for_a_small_share() -> None:
    """90 cases that begin alike and 10 that do not: one group in eleven, and nine tenths of the data."""
    begin_alike, others = [f"like-{number}" for number in range(90)], [f"other-{number}" for number in range(10)]
    alike = [("like-0", case) for case in begin_alike[1:]]
    for seed in range(20):
        side = split_cases([*begin_alike, *others], SplitConfig(held_out=0.05, seed=seed), alike)
        assert side("like-0") == "train"
        assert sum(side(case) == "held_out" for case in others) == 5
    side = split_cases(["a", "b", "c", "d", "e"], SplitConfig(held_out=0.1), [("a", "b"), ("c", "d"), ("d", "e")])
    assert [side(case) for case in "abcde"] == ["held_out", "held_out", "train", "train", "train"]


@pytest.mark.parametrize(
    ("case", "repository"),
    [
        ("django__django-11815", "django__django"),
        ("sphinx-doc__sphinx-7757", "sphinx-doc__sphinx"),
        ("python__mypy-15976_0", "python__mypy"),
        ("pandas-dev__pandas.95280573.pr_53652", "pandas-dev__pandas"),
        ("scikit-learn__scikit-learn-10297", "scikit-learn__scikit-learn"),
        ("fix-the-bug", "fix-the-bug"),
    ],
)
def test_the_repository_is_read_out_of_usual_case_names(case: str, repository: str) -> None:
    assert repository_of(case) == repository


def test_where_nothing_can_be_held_out_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    side = split_cases(["a", "b", "c"], SplitConfig(held_out=0.3), alike=[("a", "b"), ("b", "c")])
    assert {side(case) for case in "abc"} == {"train"}
    assert "Nothing is held out: all 3 cases have turns in common, so they lie on one side." in caplog.text
    caplog.clear()
    split_cases(["a", "b"], SplitConfig(held_out=0.3))
    split_cases(["a"], SplitConfig(held_out=0.3))
    assert not caplog.text
