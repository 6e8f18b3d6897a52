"""Turns that several trajectories of a corpus have in common, each to be learnt once.

    turns = TurnKeys()
    for trajectory in corpus:
        turns.add(turn_keys(trajectory, learnable), is_candidate=True)
    repeats = turns.settle()
    repeats.of(17)      # which of the learnable turns of trajectory 17 are learnt elsewhere

A session that is resumed or forked (Codex, Claude Code) is written to a new file that begins with all of the old one.
Two turns are the same where the model would see the same: equal messages before them, equal turns, equal tools. Nothing
but content is compared, so it holds for any format, and for turns that are equal by chance: a copy is often as good as
the original (ids made anew, or none), and a turn that eight runs of a case begin with would weigh eight times as much
as the ones in which they differ. `datasets.sft.repeated_turns=every` keeps that weight.

The turn stays in the history of those that follow it; the trajectory that learns it is the one with the most turns,
whatever the order of the files, so that what is only the beginning of another is not needed at all.

In memory: 8 bytes a turn for its key and 1 for the answer, and 75 for each shared turn while they are sorted (180 MiB
and two seconds for five million turns, half of them shared).
Two different turns have one key with a probability of n² / 2⁶⁵: for ten million turns, one in 370,000.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import orjson

from traceforge_core.trajectories.model import Message, Trajectory


def turn_keys(trajectory: Trajectory, turns: Sequence[int]) -> list[int]:
    """A key of 64 bits for each of the messages at `turns` (positions, ascending): equal where tools, all messages
    before it and the message itself are as the model sees them."""
    digest = hashlib.blake2b(orjson.dumps(trajectory.tools), digest_size=8)
    wanted, keys = set(turns), []
    for position, message in enumerate(trajectory.messages[: turns[-1] + 1] if turns else ()):
        digest.update(_seen(message))
        if position in wanted:
            keys.append(int.from_bytes(digest.copy().digest(), "little"))
    return keys


@dataclass(frozen=True, slots=True)
class Repeats:
    """`firsts[n]` is where the turns of trajectory n begin among all, `repeated` says of each turn whether it is learnt
    in another trajectory. `links` are pairs of trajectories (numbers) that have a turn in common."""

    firsts: npt.NDArray[np.int64]
    repeated: npt.NDArray[np.bool_]
    links: list[tuple[int, int]]

    def turns(self, number: int) -> int:
        """How many turns of a trajectory were given."""
        return int(self.firsts[number + 1] - self.firsts[number])

    def of(self, number: int) -> tuple[int, ...]:
        """Which turns of a trajectory are learnt elsewhere, counted from 0 over those that were given."""
        own = self.repeated[self.firsts[number] : self.firsts[number + 1]]
        return tuple(np.flatnonzero(own).tolist())


class TurnKeys:
    """The keys of a corpus, trajectory by trajectory."""

    def __init__(self) -> None:
        self._keys = array("Q")
        self._firsts = array("q", [0])
        self._candidates = bytearray()

    def add(self, keys: Sequence[int], is_candidate: bool) -> None:
        """The next trajectory's turns. One that is no candidate learns a turn only where no candidate has it."""
        self._keys.extend(keys)
        self._firsts.append(len(self._keys))
        self._candidates.append(is_candidate)

    def settle(self) -> Repeats:
        """Which turns are learnt elsewhere. Of the candidates that have a turn the one with the most turns learns it,
        of several the one whose last key is the lowest; nothing depends on the order in which they were added, but
        among those that are all equal."""
        keys = np.frombuffer(self._keys, np.uint64) if self._keys else np.empty(0, np.uint64)
        firsts = np.frombuffer(self._firsts, np.int64)
        repeated = np.zeros(len(keys), np.bool_)
        ranked = np.sort(keys)
        shared = np.unique(ranked[1:][ranked[1:] == ranked[:-1]])
        if not len(shared):
            return Repeats(firsts, repeated, [])
        del ranked
        places = np.searchsorted(shared, keys)
        turns = np.flatnonzero(shared[np.minimum(places, len(shared) - 1)] == keys)
        groups = places[turns]
        owners = np.searchsorted(firsts, turns, side="right") - 1
        order = np.lexsort((self._rank(keys, firsts)[owners], groups))
        turns, groups, owners = turns[order], groups[order], owners[order]
        begins = np.flatnonzero(np.diff(groups, prepend=-1))
        again = np.ones(len(turns), np.bool_)
        again[begins] = False
        repeated[turns[again]] = True
        learners = np.repeat(owners[begins], np.diff(begins, append=len(turns)))
        pairs = np.unique(np.stack([owners[again], learners[again]], axis=1), axis=0)
        return Repeats(firsts, repeated, [(one, other) for one, other in pairs.tolist()])

    def _rank(self, keys: npt.NDArray[np.uint64], firsts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The place of each trajectory among all of them, the one that learns what it has in common first."""
        counts = np.diff(firsts)
        last = np.zeros(len(counts), np.uint64)
        last[counts > 0] = keys[firsts[1:][counts > 0] - 1]
        order = np.lexsort((last, -counts, np.frombuffer(self._candidates, np.uint8) == 0))
        rank = np.empty(len(counts), np.int64)
        rank[order] = np.arange(len(counts))
        return rank


def _seen(message: Message) -> bytes:
    calls = [(action.name, action.arguments) for action in message.actions if not action.in_text]
    return orjson.dumps((message.role, message.content, message.reasoning or "", calls))
