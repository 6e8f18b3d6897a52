"""How much of a history fits: messages are left out of the middle, oldest first, whole ones only.

    fit = fit_history([120, 900, 80, 700, 60], head=2, room=2048, marker=lambda left_out: 9)
    fit.left_out     # messages behind the head that are not kept; 0 where all fit

The head (system prompt and task) and the latest messages stay; the completion is not a part of this and is never cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fit:
    """`left_out` messages directly behind the head are replaced by a marker; `tokens` is the length of what remains."""

    left_out: int
    tokens: int


def left_out_marker(count: int) -> str:
    """What stands in the place of messages that were left out."""
    return f"[... {count} {'message' if count == 1 else 'messages'} left out ...]"


def fit_history(lengths: Sequence[int], head: int, room: int, marker: Callable[[int], int]) -> Fit | None:
    """Leave out as few messages as it takes for the history to be at most `room` tokens long.

    `lengths` are the token lengths of all messages, the first `head` of which must stay. `marker(n)` is the length of
    the marker for n messages. At least the last message stays, since it is what the model reacts to. None where even
    that is too long.
    """
    rest = sum(lengths)
    if rest <= room:
        return Fit(0, rest)
    for left_out in range(1, len(lengths) - head):
        rest -= lengths[head + left_out - 1]
        if rest <= room and (tokens := rest + marker(left_out)) <= room:
            return Fit(left_out, tokens)
    return None


def spread(total: int, keep: int | None) -> Callable[[int], bool]:
    """A test for which of `total` numbered things to keep so that at most `keep` are, evenly spread over them."""
    if keep is None or total <= keep:
        return lambda number: True
    # number is kept where floor(number * keep / total) rises: exactly `keep` times in range(total).
    return lambda number: (number + 1) * keep // total > number * keep // total
