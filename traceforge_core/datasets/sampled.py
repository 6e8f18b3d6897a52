"""Turns drawn from the current policy where a recorded turn worked, rejected where a rule finds fault with them.

    candidates = sampled_candidates(corpus, renderer, config, draw, dropped)

The recorded turn is chosen, the drawn one rejected, after the very same history. Only what can be told without running
anything is called a fault:

- it does not parse: a tool call that is not JSON with a name and arguments, or of a tool that is not offered, or no
  call at all where the recorded turn makes one (in text mode: not exactly one fenced block);
- it repeats a call of the history that failed.

A drawn turn without a fault gets no label and makes no pair. Its text stands in the pair just as the policy wrote it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from traceforge_core.config import SampledConfig
from traceforge_core.datasets.budget import spread
from traceforge_core.datasets.corpus import Corpus
from traceforge_core.datasets.pairs import Branch, Candidate, size_of
from traceforge_core.datasets.recovery import turn_verdicts
from traceforge_core.datasets.sft import is_learnable
from traceforge_core.modeling.chat import ChatRenderer
from traceforge_core.modeling.messages import RenderingError, called_actions
from traceforge_core.trajectories.model import Message, Trajectory

Draw = Callable[[Sequence[Sequence[int]]], list[list[list[int]]]]
"""From the token ids of prompts to the token ids of the turns drawn at each."""

Call = tuple[str, str]
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def sampled_candidates(
    corpus: Corpus, renderer: ChatRenderer, config: SampledConfig, max_length: int, draw: Draw, dropped: Counter[str]
) -> list[Candidate]:
    """A candidate for every drawn turn with a fault; the others are counted in `dropped`.

    `draw` is called once, with the prompts of `config.histories` recorded turns that worked, spread over the corpus;
    those of more than `max_length` tokens with the turn to draw are left out.
    """
    keep = spread(sum(len(_places(trajectory)) for trajectory in corpus), config.histories)
    chosen: list[tuple[int, int]] = []
    prompts: list[list[int]] = []
    number = 0
    for position, trajectory in enumerate(corpus):
        for turn in _places(trajectory):
            number += 1
            if not keep(number - 1):
                continue
            try:
                prompt = renderer.prompt_ids(trajectory.messages[:turn], trajectory.tools)
            except RenderingError:
                dropped["chat template would lose text"] += 1
                continue
            if len(prompt) + config.new_tokens > max_length:
                dropped["sampled: too long to draw at"] += 1
                continue
            chosen.append((position, turn))
            prompts.append(prompt)
    found = []
    for (position, turn), drawn in zip(chosen, draw(prompts) if prompts else [], strict=True):
        found += list(_candidates_at(corpus, position, turn, drawn, renderer, dropped))
    return found


def fault_of(text: str, history: Sequence[Message], recorded: Message, tools: Sequence[Any]) -> str | None:
    """What a rule finds wrong with a drawn turn, in words, or None. `recorded` says how turns call here."""
    calls = _calls_in_text(text) if _in_text_mode(recorded) else _tool_calls(text, tools)
    if not calls:
        return "does not parse"
    turns, verdicts = turn_verdicts(history)
    failed = {
        (action.name if called_actions(history[turn]) else "", _key(action.arguments))
        for turn, verdict in zip(turns, verdicts, strict=True)
        if verdict is False
        for action in history[turn].actions
    }
    return "repeats a failed call" if any(call in failed for call in calls) else None


def _places(trajectory: Trajectory) -> list[int]:
    """Turns that may be chosen: they call something, they worked, and the model may learn them."""
    messages = trajectory.messages
    turns, verdicts = turn_verdicts(messages)
    return [
        turn
        for turn, worked in zip(turns, verdicts, strict=True)
        if worked and messages[turn].actions and is_learnable(messages[turn])
    ]


def _candidates_at(
    corpus: Corpus, position: int, turn: int, drawn: list[list[int]], renderer: ChatRenderer, dropped: Counter[str]
) -> Iterator[Candidate]:
    trajectory = corpus.at(position)
    history = trajectory.messages[:turn]
    recorded = trajectory.messages[turn]
    for number, ids in enumerate(drawn):
        text = renderer.tokenizer.decode(ids)
        assert isinstance(text, str)
        if not text.endswith(renderer.end_of_turn):
            dropped["sampled: did not end"] += 1
            continue
        text = text.removesuffix(renderer.end_of_turn)
        fault = fault_of(text, history, recorded, trajectory.tools)
        if fault is None:
            dropped["sampled: no fault found"] += 1
            continue
        rejected = Message("assistant", text)
        identity = f"{trajectory.trajectory_id}/drawn-{number}"
        policy = Trajectory(
            identity, trajectory.case, "drawn", "sampled", fault, [*history, rejected], trajectory.tools
        )
        yield Candidate(
            "sampled",
            trajectory.case,
            sum(size_of(message) for message in [*history, recorded, rejected]),
            Branch(trajectory.trajectory_id, partial(corpus.at, position), turn, turn, turn + 1),
            Branch(identity, partial(_same, policy), turn, turn, turn + 1),
        )


def _same(trajectory: Trajectory) -> Trajectory:
    return trajectory


def _in_text_mode(recorded: Message) -> bool:
    return not called_actions(recorded)


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
