"""Trimming a history, and keeping some of many."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from traceforge_core.datasets.budget import fit_history, left_out_marker, spread

lengths = st.lists(st.integers(0, 50), min_size=1, max_size=20)


def marker(count: int) -> int:
    return 5 + len(str(count))


@given(lengths=lengths, data=st.data(), room=st.integers(-5, 300))
def test_a_history_loses_the_fewest_middle_messages_that_make_it_fit(
    lengths: list[int], data: st.DataObject, room: int
) -> None:
    head = data.draw(st.integers(0, len(lengths)))

    def size(left_out: int) -> int:
        kept = lengths[:head] + lengths[head + left_out :]
        return sum(kept) + (marker(left_out) if left_out else 0)

    possible = [n for n in range(max(1, len(lengths) - head)) if size(n) <= room]
    fit = fit_history(lengths, head, room, marker)
    if fit is None:
        assert not possible
    else:
        assert fit.left_out == possible[0]
        assert fit.tokens == size(fit.left_out) <= room


@given(total=st.integers(0, 300), keep=st.none() | st.integers(1, 300))
def test_spreading_keeps_exactly_as_many_as_wanted_with_even_gaps(total: int, keep: int | None) -> None:
    wanted = spread(total, keep)
    kept = [number for number in range(total) if wanted(number)]
    assert len(kept) == (total if keep is None else min(keep, total))
    gaps = {after - before for before, after in pairwise(kept)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_marker_says_how_many_were_left_out() -> None:
    assert left_out_marker(1) == "[... 1 message left out ...]"
    assert left_out_marker(12) == "[... 12 messages left out ...]"
