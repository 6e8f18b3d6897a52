"""What an SFT sample is, and which turns of a trajectory may become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from traceforge_core.modeling.chat import Ids
from traceforge_core.trajectories.model import Message, Trajectory

IGNORED = -100
WHOLE_TRAJECTORY = -1


@dataclass(frozen=True, slots=True)
class SftSample:
    """`pieces` are the tokens, one behind the other, and `learned` says of each piece whether the loss counts in it.
    `turn` is the position of the assistant turn in its trajectory, -1 for a whole trajectory. `trimmed_messages` were
    left out of the history.

    Samples of one trajectory share their pieces, so that a history is in memory once for all turns that have it.
    """

    sample_id: str
    case: str
    trajectory_id: str
    turn: int
    prompt: str
    completion: str
    pieces: Sequence[Ids]
    learned: Sequence[bool]
    trimmed_messages: int

    @property
    def input_ids(self) -> Ids:
        """All tokens, int32."""
        return np.concatenate(self.pieces)

    @property
    def labels(self) -> Ids:
        """`input_ids` where the loss counts, else -100; int32."""
        return np.concatenate(self._parts_of_labels())

    @property
    def tokens(self) -> int:
        """How many there are."""
        return sum(map(len, self.pieces))

    @property
    def learned_tokens(self) -> int:
        """How many of them the loss counts."""
        return sum(len(piece) for piece, learn in zip(self.pieces, self.learned, strict=True) if learn)

    def row(self) -> dict[str, Any]:
        """The columns of the Parquet file; lists in parts, as RowWriter takes them."""
        return {
            "sample_id": self.sample_id,
            "case": self.case,
            "trajectory_id": self.trajectory_id,
            "turn": self.turn,
            "prompt": self.prompt,
            "completion": self.completion,
            "input_ids": tuple(self.pieces),
            "labels": self._parts_of_labels(),
            "tokens": self.tokens,
            "trimmed_messages": self.trimmed_messages,
        }

    def _parts_of_labels(self) -> tuple[Ids, ...]:
        parts: list[Ids] = []
        for learn, run in groupby(zip(self.pieces, self.learned, strict=True), key=lambda pair: pair[1]):
            own = [piece for piece, _ in run]
            parts += own if learn else [np.broadcast_to(np.int32(IGNORED), sum(map(len, own)))]
        return tuple(parts)


def learnable_turns(trajectory: Trajectory) -> list[int]:
    """Positions of the assistant turns that the model may learn to produce."""
    return [turn for turn in trajectory.turns if is_learnable(trajectory.messages[turn])]


def is_learnable(message: Message) -> bool:
    """Whether a message is a turn that the model may learn to produce, and has something in it."""
    has_something = bool(message.content.strip() or message.reasoning or message.actions)
    return message.role == "assistant" and message.trainable and has_something
