"""A trajectory as sequences of chat messages that are short enough, each of its turns learned in exactly one of them.

    for window in windows(trajectory, learnable, renderer, max_length, dropped):
        window.encoded.input_ids, window.encoded.assistant_mask

From the end to the beginning: the head with as many of the latest turns as fit behind it, a note where some are left
out between; then the same of what was left out, until nothing is. A turn never loses a part, nor the head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from traceforge_core.config import SftDataConfig
from traceforge_core.datasets.budget import fit_history, left_out_marker
from traceforge_core.datasets.sample import WHOLE_TRAJECTORY, SftSample, learnable_turns
from traceforge_core.modeling.chat import ChatRenderer, Encoded, Ids
from traceforge_core.modeling.messages import RenderingError
from traceforge_core.trajectories.model import Message, Trajectory


@dataclass(frozen=True, slots=True)
class Window:
    """`trimmed` messages are left out behind the head; the turn at position `last` is the last of the window."""

    last: int
    trimmed: int
    encoded: Encoded


def windows(
    trajectory: Trajectory, learnable: Sequence[int], renderer: ChatRenderer, max_length: int, dropped: Counter[str]
) -> Iterator[Window]:
    """The windows that together hold every turn of `learnable` (positions, ascending) once. Turns that do not fit even
    alone behind the head are counted in `dropped`, and turns whose history the template does not keep whole: these and
    nothing else, so that a turn is learnt or lost alike in whichever trajectory it is."""
    rest = list(learnable)
    known: dict[str, Ids] = {}
    while rest:
        last = rest[-1]
        try:
            trimmed, encoded = _encode_within(trajectory, last, renderer, max_length, known)
        except RenderingError:
            kept = _renderable(trajectory, rest, renderer, known)
            dropped["chat template would lose text"] += len(rest) - kept
            rest = rest[:kept]
            continue
        if encoded is None:
            dropped["too long"] += 1
            rest.pop()
            continue
        yield Window(last, trimmed, encoded)
        first_kept = trajectory.turns[0] + trimmed
        rest = [turn for turn in rest if turn < first_kept] if trimmed else []


def _renderable(trajectory: Trajectory, turns: Sequence[int], renderer: ChatRenderer, known: dict[str, Ids]) -> int:
    """How many of the turns, the last of which the template refuses, come before the first that it refuses."""
    kept, refused = 0, len(turns) - 1
    while kept < refused:
        middle = (kept + refused) // 2
        try:
            renderer.encode(trajectory.messages[: turns[middle] + 1], trajectory.tools, known)
        except RenderingError:
            refused = middle
        else:
            kept = middle + 1
    return kept


def _encode_within(
    trajectory: Trajectory, last: int, renderer: ChatRenderer, max_length: int, known: dict[str, Ids]
) -> tuple[int, Encoded | None]:
    """Tokens of the messages up to the turn at `last`, the oldest turns (each with the observations behind it) left out
    as far as it takes, and how many messages that is; None where the head and that turn are too long already."""
    messages = trajectory.messages[: last + 1]
    encoded = renderer.encode(messages, trajectory.tools, known)
    borders = [0, *(turn.start for turn in encoded.turns), encoded.turns[-1].end]
    lengths = [end - start for start, end in pairwise(borders)]
    positions = [turn for turn in trajectory.turns if turn < len(messages)]
    trimmed = 0
    room = max_length
    while encoded.turns[-1].end > max_length:
        fit = fit_history(lengths, 1, room, lambda count: _note_length(renderer, positions[count] - positions[0]))
        if fit is None:
            return 0, None
        trimmed = positions[fit.left_out] - positions[0]
        encoded = renderer.encode(_without_middle(messages, positions[0], trimmed), trajectory.tools, known)
        room -= max(1, encoded.turns[-1].end - max_length)  # the lengths were an estimate: a little less next time
    return trimmed, encoded


def _without_middle(messages: list[Message], head: int, trimmed: int) -> list[Message]:
    """The first `head` messages with a note at their end, then all behind the `trimmed` ones. The note joins the task,
    because some templates refuse two user messages in a row."""
    if not trimmed:
        return messages
    note = left_out_marker(trimmed)
    first = list(messages[:head])
    if first and first[-1].role in ("user", "tool"):
        first[-1] = replace(first[-1], content=f"{first[-1].content}\n\n{note}")
    else:
        first.append(Message("user", note))
    return first + messages[head + trimmed :]


def _note_length(renderer: ChatRenderer, count: int) -> int:
    return len(renderer.tokens(["\n\n" + left_out_marker(count)])[0])


def native_samples(
    trajectory: Trajectory, renderer: ChatRenderer, config: SftDataConfig, dropped: Counter[str]
) -> Iterator[SftSample]:
    """A sample for each window of the trajectory. Turns that are in none are counted in `dropped` by reason."""
    learnable = learnable_turns(trajectory)
    for window in windows(trajectory, learnable, renderer, config.max_length, dropped):
        whole = window.last == learnable[-1]
        identity = trajectory.trajectory_id if whole else f"{trajectory.trajectory_id}#to-{window.last}"
        yield _native_sample(trajectory, identity, window.encoded, window.trimmed, config)


def _native_sample(
    trajectory: Trajectory, identity: str, encoded: Encoded, trimmed: int, config: SftDataConfig
) -> SftSample:
    pieces: list[Ids] = []
    learned: list[bool] = []
    position = 0
    for turn in encoded.turns:
        pieces += [encoded.input_ids[position : turn.start], encoded.input_ids[turn.start : turn.end]]
        learned += [config.loss_on == "everything", bool(encoded.assistant_mask[turn.start])]
        position = turn.end
    border = encoded.turns[0].text_start
    return SftSample(
        sample_id=identity,
        case=trajectory.case,
        trajectory_id=trajectory.trajectory_id,
        turn=WHOLE_TRAJECTORY,
        prompt=encoded.text[:border],
        completion=encoded.text[border : encoded.turns[-1].text_end],
        pieces=pieces,
        learned=learned,
        trimmed_messages=trimmed,
    )
