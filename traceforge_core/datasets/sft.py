"""SFT samples: what the model should write, given all that came before it.

    for sample in sft_samples(corpus, renderer, config.datasets.sft, keep, dropped):
        ...

`blocks`: one sample an assistant turn. The prompt is one user message with the history as text (see `blocks`), the
completion the turn's reasoning, text and calls through the chat template. Each message is tokenised once for all turns
that have it in their history. `native`: one sample a trajectory, chat messages with tool calls, loss on every trainable
turn. Either way a history that is too long loses whole messages from its middle, and a completion is never cut. Turns
that `native` leaves out of the middle are learned in further samples of the same trajectory, each of which ends where
the one after it begins: every trainable turn is learned exactly once, or counted as too long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from traceforge_core.config import SftDataConfig
from traceforge_core.datasets.block_samples import BlockMaker
from traceforge_core.datasets.native import native_samples
from traceforge_core.datasets.sample import WHOLE_TRAJECTORY, SftSample, learnable_turns
from traceforge_core.modeling.chat import ChatRenderer
from traceforge_core.trajectories.model import Trajectory


def candidate_turns(trajectory: Trajectory, config: SftDataConfig) -> list[int]:
    """Positions of the turns to learn from (for `native`: [-1] where there is any), before any length is looked at."""
    if config.outcomes == "resolved" and trajectory.outcome != "resolved":
        return []
    turns = learnable_turns(trajectory)
    return turns if config.style == "blocks" else [WHOLE_TRAJECTORY][: len(turns)]


def sft_samples(
    trajectories: Iterable[Trajectory],
    renderer: ChatRenderer,
    config: SftDataConfig,
    keep: Callable[[int], bool],
    dropped: Counter[str],
) -> Iterator[SftSample]:
    """Samples in the order of the trajectories. `keep` says which of the candidates, numbered in that order, are
    wanted. What is not made is counted in `dropped` by reason."""
    number = 0
    maker = BlockMaker(renderer, config) if config.style == "blocks" else None
    for trajectory in trajectories:
        turns = candidate_turns(trajectory, config)
        wanted = [turn for position, turn in enumerate(turns) if keep(number + position)]
        number += len(turns)
        dropped["over max_samples"] += len(turns) - len(wanted)
        if not wanted:
            continue
        if maker:
            yield from maker.samples(trajectory, wanted, dropped)
        else:
            yield from native_samples(trajectory, renderer, config, dropped)
