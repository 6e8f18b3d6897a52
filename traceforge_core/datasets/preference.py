"""Preference pairs: one prompt, a chosen and a rejected completion, as tokens that every strategy sees alike.

    for pair in preference_pairs(candidates_by_case, renderer, config.datasets.preference, dropped):
        ...

A case's candidates are taken shortest first, from each miner in turn, until its cap is reached. A pair is made only if
both branches have the very same prompt tokens, both have something that counts in a score, they differ in it, and each
fits `max_length` whole: nothing is ever cut. Why a candidate was not taken is counted by reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from traceforge_core.config import PreferenceDataConfig
from traceforge_core.datasets.messages import messages_to_json
from traceforge_core.datasets.pairs import Branch, Candidate
from traceforge_core.datasets.sample import is_learnable
from traceforge_core.modeling.chat import ChatRenderer, Ids
from traceforge_core.modeling.messages import RenderingError
from traceforge_core.trajectories.model import Message

GRAM = 5


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Ids are int32 arrays; `chosen_ids` and `rejected_ids` are the completions only. A mask has 1 where a token counts
    in the score. Rounds are assistant turns of a completion."""

    pair_id: str
    case: str
    miner: str
    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: Sequence[Any]
    prompt_ids: Ids
    chosen_ids: Ids
    rejected_ids: Ids
    chosen_mask: Ids
    rejected_mask: Ids
    chosen_trajectory: str
    rejected_trajectory: str

    def row(self) -> dict[str, Any]:
        """The columns of the Parquet file."""
        return {
            "pair_id": self.pair_id,
            "case": self.case,
            "miner": self.miner,
            "prompt": messages_to_json(self.prompt),
            "chosen": messages_to_json(self.chosen),
            "rejected": messages_to_json(self.rejected),
            "tools": json.dumps(self.tools),
            "prompt_ids": self.prompt_ids,
            "chosen_ids": self.chosen_ids,
            "rejected_ids": self.rejected_ids,
            "chosen_mask": self.chosen_mask,
            "rejected_mask": self.rejected_mask,
            "chosen_trajectory": self.chosen_trajectory,
            "rejected_trajectory": self.rejected_trajectory,
        }


@dataclass(frozen=True, slots=True)
class _Side:
    """One tokenised branch. `grams` are the distinct runs of GRAM scored tokens, to compare sides by."""

    messages: list[Message]
    prompt: list[Message]
    tools: Sequence[Any]
    prompt_ids: Ids
    ids: Ids
    mask: Ids
    scored: bytes
    grams: frozenset[bytes]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.ids)


class _Refused(Exception):
    """Why a candidate makes no pair."""


def preference_pairs(
    cases: Iterable[tuple[str, Sequence[Sequence[Candidate]]]],
    renderer: ChatRenderer,
    config: PreferenceDataConfig,
    dropped: Counter[str],
) -> Iterator[PreferencePair]:
    """Pairs case by case. `cases` gives each case's candidates, one list a miner. One case is in memory at a time."""
    for _, by_miner in cases:
        yield from _pairs_of_case(by_miner, renderer, config, dropped)


def _pairs_of_case(
    by_miner: Sequence[Sequence[Candidate]],
    renderer: ChatRenderer,
    config: PreferenceDataConfig,
    dropped: Counter[str],
) -> Iterator[PreferencePair]:
    encode = _SideCache(renderer)
    kept: list[tuple[_Side, _Side]] = []
    ordered = _in_turn(by_miner)
    for number, candidate in enumerate(ordered):
        if len(kept) == config.max_pairs_per_case:
            dropped["over max_pairs_per_case"] += len(ordered) - number
            return
        try:
            chosen, rejected = _sides(candidate, encode, config)
            _check_new(chosen, rejected, kept, config)
        except _Refused as reason:
            dropped[str(reason)] += 1
            continue
        kept.append((chosen, rejected))
        yield _pair(candidate, chosen, rejected)


def _in_turn(by_miner: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    def rank(candidate: Candidate) -> tuple[int, str, int, str, int]:
        chosen, rejected = candidate.chosen, candidate.rejected
        return candidate.size, chosen.trajectory_id, chosen.start, rejected.trajectory_id, rejected.start

    rounds = zip_longest(*(sorted(candidates, key=rank) for candidates in by_miner))
    return [candidate for candidate in chain.from_iterable(rounds) if candidate is not None]


def _sides(
    candidate: Candidate, encode: Callable[[Branch], _Side], config: PreferenceDataConfig
) -> tuple[_Side, _Side]:
    chosen = encode(candidate.chosen)
    if candidate.miner == "outcome" and config.max_extra_rounds is not None:
        rounds = sum(message.role == "assistant" for message in chosen.messages) + config.max_extra_rounds
        rejected = encode(_first_rounds(candidate.rejected, rounds))
    else:
        rejected = encode(candidate.rejected)
    if not np.array_equal(chosen.prompt_ids, rejected.prompt_ids):
        raise _Refused("prompts differ once rendered")
    for side, name in ((chosen, "chosen"), (rejected, "rejected")):
        if not any(is_learnable(message) for message in side.messages):
            raise _Refused(f"nothing to learn from in {name}")
    if chosen.scored == rejected.scored:
        raise _Refused("chosen and rejected are identical")
    if max(chosen.length, rejected.length) > config.max_length:
        raise _Refused("too long")
    if config.max_token_ratio is not None:
        fewer, more = sorted((int(chosen.mask.sum()), int(rejected.mask.sum())))
        if more > config.max_token_ratio * fewer:
            raise _Refused("over max_token_ratio")
    return chosen, rejected


def _check_new(
    chosen: _Side, rejected: _Side, kept: Sequence[tuple[_Side, _Side]], config: PreferenceDataConfig
) -> None:
    for old_chosen, old_rejected in kept:
        if not np.array_equal(old_chosen.prompt_ids, chosen.prompt_ids):
            continue
        if old_chosen.scored == chosen.scored and old_rejected.scored == rejected.scored:
            raise _Refused("duplicate of a pair")
        shared = min(_likeness(old_chosen, chosen), _likeness(old_rejected, rejected))
        if config.near_duplicate < 1 and shared >= config.near_duplicate:
            raise _Refused("near duplicate of a pair")


def _likeness(one: _Side, other: _Side) -> float:
    """Jaccard index of the two sets of 5-grams."""
    union = len(one.grams | other.grams)
    return len(one.grams & other.grams) / union if union else 1.0


class _SideCache:
    """Tokenises each branch of a case once, however many pairs it is in."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer
        self._sides: dict[tuple[str, int, int, int], _Side | None] = {}

    def __call__(self, branch: Branch) -> _Side:
        key = (branch.trajectory_id, branch.prompt_stop, branch.start, branch.stop)
        if key not in self._sides:
            self._sides[key] = self._encode(branch)
        side = self._sides[key]
        if side is None:
            raise _Refused("chat template would lose text")
        return side

    def _encode(self, branch: Branch) -> _Side | None:
        trajectory = branch.load()
        prompt = trajectory.messages[: branch.prompt_stop]
        completion = trajectory.messages[branch.start : branch.stop]
        if not completion:
            raise _Refused("nothing to learn from in one side")
        try:
            encoded = self.renderer.encode_completion(prompt, completion, trajectory.tools)
        except RenderingError:
            return None
        ids, mask = encoded.completion_ids, encoded.completion_mask
        scored = ids[mask == 1]
        return _Side(
            messages=completion,
            prompt=prompt,
            tools=trajectory.tools,
            prompt_ids=encoded.prompt_ids,
            ids=ids,
            mask=mask,
            scored=scored.tobytes(),
            grams=_grams(scored),
        )


def _grams(scored: Ids) -> frozenset[bytes]:
    count = max(1, len(scored) - GRAM + 1)
    return frozenset(scored[start : start + GRAM].tobytes() for start in range(count))


def _first_rounds(branch: Branch, rounds: int) -> Branch:
    """The branch cut behind its first `rounds` assistant turns."""
    turns = [turn for turn in branch.load().turns if branch.start <= turn < branch.stop]
    return branch if len(turns) <= rounds else replace(branch, stop=turns[rounds - 1] + 1)


def _pair(candidate: Candidate, chosen: _Side, rejected: _Side) -> PreferencePair:
    ends = [f"{branch.trajectory_id}#{branch.start}" for branch in (candidate.chosen, candidate.rejected)]
    return PreferencePair(
        pair_id=f"{candidate.miner}:{ends[0]}>{ends[1]}",
        case=candidate.case,
        miner=candidate.miner,
        prompt=chosen.prompt,
        chosen=chosen.messages,
        rejected=rejected.messages,
        tools=chosen.tools,
        prompt_ids=chosen.prompt_ids,
        chosen_ids=chosen.ids,
        rejected_ids=rejected.ids,
        chosen_mask=chosen.mask,
        rejected_mask=rejected.mask,
        chosen_trajectory=candidate.chosen.trajectory_id,
        rejected_trajectory=candidate.rejected.trajectory_id,
    )
