"""Turns drawn from the current policy at recorded histories, rejected or chosen by what rules find.

    candidates = sampled_candidates(corpus, renderer, config.datasets.preference, draw, dropped)

The recorded turn and the drawn one follow the very same history. Only what can be told without running anything counts:

Rejected is a drawn turn, against a recorded one that worked, that has a fault:

- it does not parse: a tool call that is not JSON with a name and arguments, or of a tool that is not offered, or no
  call at all where the recorded turn makes one (in text mode: not exactly one fenced block);
- it repeats a call of the history that failed.

Chosen is a drawn turn, against a recorded one that failed, that is known to be good: it has no fault, and it makes
exactly the calls of the turn that put the failure right in this run (see `recovery`; the names and arguments are equal,
but for white space at their ends). What the recorded turn said of the failure does not matter here, for the drawn turn
was written without having seen it.

A drawn turn of which no rule says anything gets no label and makes no pair. Its text stands in the pair just as the
policy wrote it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from traceforge_core.config import PreferenceDataConfig
from traceforge_core.datasets.budget import spread
from traceforge_core.datasets.corpus import Corpus
from traceforge_core.datasets.pairs import Branch, Candidate, size_of
from traceforge_core.datasets.recovery import recoveries, turn_verdicts
from traceforge_core.datasets.sample import is_learnable
from traceforge_core.modeling.chat import ChatRenderer
from traceforge_core.modeling.messages import RenderingError, called_actions
from traceforge_core.trajectories.model import Message, Trajectory

Draw = Callable[[Sequence[Sequence[int]]], list[list[list[int]]]]
"""From the token ids of prompts to the token ids of the turns drawn at each."""

Call = tuple[str, str]
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Place:
    """A recorded turn to draw in the place of. `repaired_by` is the turn that put it right where it failed, and None
    where it worked."""

    turn: int
    repaired_by: int | None


def sampled_candidates(
    corpus: Corpus, renderer: ChatRenderer, config: PreferenceDataConfig, draw: Draw, dropped: Counter[str]
) -> list[Candidate]:
    """A candidate for every drawn turn that a rule judges; the others are counted in `dropped`.

    `draw` is called once, with the prompts of `config.sampled.histories` recorded turns, spread over the corpus; those
    of more than `config.max_length` tokens with the turn to draw are left out.
    """
    sampled = config.sampled
    keep = spread(sum(len(_places(trajectory, config)) for trajectory in corpus), sampled.histories)
    chosen: list[tuple[int, Place]] = []
    prompts: list[list[int]] = []
    number = 0
    for position, trajectory in enumerate(corpus):
        for place in _places(trajectory, config):
            number += 1
            if not keep(number - 1):
                continue
            try:
                prompt = renderer.prompt_ids(trajectory.messages[: place.turn], trajectory.tools)
            except RenderingError:
                dropped["chat template would lose text"] += 1
                continue
            if len(prompt) + sampled.new_tokens > config.max_length:
                dropped["sampled: too long to draw at"] += 1
                continue
            chosen.append((position, place))
            prompts.append(prompt)
    found = []
    for (position, place), drawn in zip(chosen, draw(prompts) if prompts else [], strict=True):
        found += list(_candidates_at(corpus, position, place, drawn, renderer, dropped))
    return found


def fault_of(text: str, history: Sequence[Message], recorded: Message, tools: Sequence[Any]) -> str | None:
    """What a rule finds wrong with a drawn turn, in words, or None. `recorded` says how turns call here."""
    calls = _calls_of(text, recorded, tools)
    if not calls:
        return "does not parse"
    turns, verdicts = turn_verdicts(history)
    failed = {
        call
        for turn, verdict in zip(turns, verdicts, strict=True)
        if verdict is False
        for call in _recorded_calls(history[turn])
    }
    return "repeats a failed call" if any(call in failed for call in calls) else None


def merit_of(
    text: str, history: Sequence[Message], recorded: Message, repaired: Message, tools: Sequence[Any]
) -> str | None:
    """Why a rule finds a drawn turn good in the place of `recorded`, which failed and which `repaired` put right, in
    words, or None."""
    if fault_of(text, history, recorded, tools):
        return None
    same = sorted(_calls_of(text, recorded, tools)) == sorted(_recorded_calls(repaired))
    return "makes the call that worked" if same else None


def _places(trajectory: Trajectory, config: PreferenceDataConfig) -> list[Place]:
    """Turns that call something and that the model may learn: those that worked, to be chosen, and those that failed
    and were put right, to be rejected. In order of the turns."""
    messages = trajectory.messages
    turns, verdicts = turn_verdicts(messages)
    found = []
    if "rejected" in config.sampled.sides:
        found += [
            Place(turn, None)
            for turn, worked in zip(turns, verdicts, strict=True)
            if worked and messages[turn].actions and is_learnable(messages[turn])
        ]
    if "chosen" in config.sampled.sides:
        found += [Place(failed, worked) for failed, worked in recoveries(messages, config.recovery_within)]
    return sorted(found, key=lambda place: place.turn)


def _candidates_at(
    corpus: Corpus, position: int, place: Place, drawn: list[list[int]], renderer: ChatRenderer, dropped: Counter[str]
) -> Iterator[Candidate]:
    trajectory = corpus.at(position)
    turn = place.turn
    history = trajectory.messages[:turn]
    recorded = trajectory.messages[turn]
    for number, ids in enumerate(drawn):
        text = renderer.tokenizer.decode(ids)
        assert isinstance(text, str)
        if not text.endswith(renderer.end_of_turn):
            dropped["sampled: did not end"] += 1
            continue
        text = text.removesuffix(renderer.end_of_turn)
        if place.repaired_by is None:
            verdict = fault_of(text, history, recorded, trajectory.tools)
            unlabelled = "sampled: no fault found"
        else:
            repaired = trajectory.messages[place.repaired_by]
            verdict = merit_of(text, history, recorded, repaired, trajectory.tools)
            unlabelled = "sampled: not known to be good"
        if verdict is None:
            dropped[unlabelled] += 1
            continue
        written = Message("assistant", text)
        identity = f"{trajectory.trajectory_id}/drawn-{number}"
        policy = Trajectory(
            identity, trajectory.case, "drawn", "sampled", verdict, [*history, written], trajectory.tools
        )
        branches = [
            Branch(trajectory.trajectory_id, partial(corpus.at, position), turn, turn, turn + 1),
            Branch(identity, partial(_same, policy), turn, turn, turn + 1),
        ]
        if place.repaired_by is not None:
            branches.reverse()
        size = sum(size_of(message) for message in [*history, recorded, written])
        yield Candidate("sampled", trajectory.case, size, chosen=branches[0], rejected=branches[1])


def _same(trajectory: Trajectory) -> Trajectory:
    return trajectory


def _calls_of(text: str, recorded: Message, tools: Sequence[Any]) -> list[Call]:
    """The calls of a drawn turn, read as the recorded one makes its own: as tool calls, or out of its text."""
    return _tool_calls(text, tools) if called_actions(recorded) else _calls_in_text(text)


def _recorded_calls(message: Message) -> list[Call]:
    in_text = not called_actions(message)
    return [("" if in_text else action.name, _key(action.arguments)) for action in message.actions]


def _tool_calls(text: str, tools: Sequence[Any]) -> list[Call]:
    """The calls of a drawn turn; empty where there are none, or any of them is broken or of an unknown tool."""
    known = {tool.get("function", tool).get("name") for tool in tools if isinstance(tool, dict)}
    bodies = CALL.findall(text)
    if text.count("<tool_call>") != len(bodies):
        return []
    calls = []
    for body in bodies:
        try:
            call = json.loads(body)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, KeyError, TypeError):
            return []
        if not isinstance(name, str) or not isinstance(arguments, dict) or (known and name not in known):
            return []
        calls.append((name, _key(arguments)))
    return calls


def _calls_in_text(text: str) -> list[Call]:
    blocks = FENCE.findall(text)
    return [("", _key({"command": blocks[0]}))] if len(blocks) == 1 else []


def _key(arguments: dict[str, Any]) -> str:
    stripped = {name: value.strip() if isinstance(value, str) else value for name, value in arguments.items()}
    return json.dumps(stripped, sort_keys=True)
