"""Pairs before they are tokenised: which stretch of which trajectory is chosen, which rejected, after which prompt.

A candidate is cheap (numbers and a way to read the trajectory), so that all of a case can be sorted by size before
any of them is loaded. Candidates come from `outcome_candidates` and
`recovery_candidates` here, and from `given` and `sampled`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from traceforge_core.config import Miner
from traceforge_core.datasets.corpus import Corpus
from traceforge_core.datasets.messages import prompt_hash
from traceforge_core.datasets.recovery import recoveries, refers_to_unseen
from traceforge_core.trajectories.model import Message, OutcomeLabel, Trajectory


@dataclass(frozen=True, slots=True)
class Branch:
    """`messages[:prompt_stop]` of a trajectory as the prompt, `messages[start:stop]` as what follows it."""

    trajectory_id: str
    load: Callable[[], Trajectory]
    prompt_stop: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair that may be made. `size` is the length of prompt and both completions in characters."""

    miner: Miner
    case: str
    size: int
    chosen: Branch
    rejected: Branch


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What mining needs to know of a trajectory: `number` in the corpus, `head` messages before the first turn, `stop`
    behind the last turn, sizes in characters, recoveries as (failed, worked, size, key of what worked), and how many
    more there were whose later turn refers to what its prompt would not show."""

    number: int
    trajectory_id: str
    case: str
    outcome: OutcomeLabel | None
    prompt: str
    head: int
    stop: int
    head_size: int
    completion_size: int
    recoveries: tuple[tuple[int, int, int, int], ...]
    refused_recoveries: int


def survey(number: int, trajectory: Trajectory, recover_within: int, keys: Mapping[int, int]) -> Surveyed:
    """Read one trajectory for mining; `recover_within` 0 looks for no recoveries. `keys` are its learnable turns' by
    position (see `repeats`)."""
    messages, turns = trajectory.messages, trajectory.turns
    head = turns[0] if turns else len(messages)
    stop = turns[-1] + 1 if turns else head
    sizes = [size_of(message) for message in messages]
    every = recoveries(messages, recover_within) if recover_within else []
    found = [(failed, worked) for failed, worked in every if not refers_to_unseen(messages, failed, worked)]
    return Surveyed(
        number=number,
        trajectory_id=trajectory.trajectory_id,
        case=trajectory.case,
        outcome=trajectory.outcome,
        prompt=prompt_hash(messages[:head], trajectory.tools),
        head=head,
        stop=stop,
        head_size=sum(sizes[:head]),
        completion_size=sum(sizes[head:stop]),
        recoveries=tuple((f, w, sum(sizes[:f]) + sizes[f] + sizes[w], keys[w]) for f, w in found),
        refused_recoveries=len(every) - len(found),
    )


def outcome_candidates(records: Iterable[Surveyed], corpus: Corpus) -> Iterator[Candidate]:
    """Every resolved run against every unresolved run of one case whose prompt is equal."""
    groups: dict[tuple[str, str], dict[OutcomeLabel, list[Surveyed]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.outcome is not None:
            groups[record.case, record.prompt][record.outcome].append(record)
    for (case, _), group in groups.items():
        for resolved in group["resolved"]:
            for unresolved in group["unresolved"]:
                size = resolved.head_size + resolved.completion_size + unresolved.completion_size
                yield Candidate("outcome", case, size, _whole(resolved, corpus), _whole(unresolved, corpus))


def recovery_candidates(records: Iterable[Surveyed], corpus: Corpus, seen: set[tuple[int, int]]) -> Iterator[Candidate]:
    """Every recovery: the turn that worked against the one that failed, both after the history of the failed one. Not
    those that are in `seen`, where each new one is added: a resumed session has the recoveries of the first once more.
    """
    for record in records:
        for failed, worked, size, key in record.recoveries:
            if (key, failed) in seen:
                continue
            seen.add((key, failed))
            chosen = Branch(record.trajectory_id, _loader(record, corpus), failed, worked, worked + 1)
            rejected = Branch(record.trajectory_id, _loader(record, corpus), failed, failed, failed + 1)
            yield Candidate("recovery", record.case, size, chosen, rejected)


def _whole(record: Surveyed, corpus: Corpus) -> Branch:
    return Branch(record.trajectory_id, _loader(record, corpus), record.head, record.head, record.stop)


def _loader(record: Surveyed, corpus: Corpus) -> Callable[[], Trajectory]:
    number = record.number
    return lambda: corpus.at(number)


def size_of(message: Message) -> int:
    """Length of a message in characters, calls included."""
    arguments = sum(len(str(value)) for action in message.actions for value in action.arguments.values())
    return len(message.content) + len(message.reasoning or "") + arguments
