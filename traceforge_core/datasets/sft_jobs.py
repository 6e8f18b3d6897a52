"""SFT samples of a whole corpus: in this process, or in several for a corpus that is worth their start.

    jobs = plan(chosen, counts, sizes, sides, repeats.of)
    for made in make_parts(jobs, corpus, renderer, model_dir, config.datasets, scratch):
        made.parts["train"], made.samples, made.dropped

A job is some consecutive trajectories with what is wanted of them. It makes the same samples in whichever process, so
that the dataset does not depend on how many there are. What it makes it leaves as Parquet files that only have to be
joined (see `joining`), so that encoding and compressing the samples, which for style `blocks` are many times the text
they are made of, is shared out too. Memory stays flat however large the samples are.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from traceforge_core.config import DatasetsConfig, SftDataConfig
from traceforge_core.datasets.block_samples import VERIFY_EVERY
from traceforge_core.datasets.corpus import Corpus
from traceforge_core.datasets.parquet import SFT_SCHEMA, RowWriter
from traceforge_core.datasets.sample import learnable_turns
from traceforge_core.datasets.sft import sft_samples
from traceforge_core.datasets.splits import SIDES, Side
from traceforge_core.modeling.chat import ChatRenderer, load_renderer
from traceforge_core.processes.in_order import ShouldStop, in_order
from traceforge_core.trajectories.model import Trajectory

JOB_CHARACTERS = 16 << 20
WORTH_WORKERS = 32 << 20
"""Characters of text from which on workers pay: they start in about two seconds of a core each, which tokenises some
four million characters."""
MOST_WORKERS = 16
"""Where nobody says how many: each holds some 400 MB of libraries."""


@dataclass(frozen=True, slots=True)
class SampleJob:
    """`trajectories` are positions in the corpus, `sides` where their cases belong; `wanted` are the candidates to make
    (sft.candidate_turns), numbered over all of these trajectories, or None for all. `characters` is how much text they
    are. `repeated` says of each trajectory which of its learnable turns (0 is the first) another one learns
    (see `repeats`): they are no candidates, and context only."""

    index: int
    trajectories: tuple[int, ...]
    sides: tuple[Side, ...]
    wanted: frozenset[int] | None
    characters: int
    repeated: tuple[tuple[int, ...], ...]


class SampleFigures(NamedTuple):
    """A sample in numbers. `learned` are its tokens in the loss, `trimmed` the messages left out of its history; it is
    the `nth` that its candidate made (0 is the first, and for `blocks` the only one)."""

    side: Side
    tokens: int
    learned: int
    trimmed: int
    nth: int


@dataclass(frozen=True, slots=True)
class Made:
    """What a job made: a Parquet file a side, the samples in the order they were made in, and how many were not made by
    reason."""

    parts: Mapping[Side, Path]
    samples: list[SampleFigures]
    dropped: dict[str, int]


def plan(
    chosen: npt.NDArray[np.int64],
    counts: Sequence[int],
    sizes: Sequence[int],
    sides: Sequence[Side],
    repeated: Callable[[int], tuple[int, ...]],
) -> list[SampleJob]:
    """Jobs for the candidates `chosen` (numbers over the whole corpus, ascending; int64), where trajectory n has
    `counts[n]` candidates and `sizes[n]` characters, lies on the side `sides[n]`, and `repeated(n)` of its learnable
    turns are another's."""
    firsts = np.concatenate([[0], np.cumsum(np.asarray(counts, np.int64))])
    owners = np.searchsorted(firsts, chosen, side="right") - 1
    numbers, starts = np.unique(owners, return_index=True)
    ends = [*starts[1:].tolist(), len(chosen)][: len(starts)]
    jobs: list[SampleJob] = []
    trajectories: list[int] = []
    wanted: list[int] = []
    offset = characters = 0
    for number, start, end in zip(numbers.tolist(), starts.tolist(), ends, strict=True):
        trajectories.append(number)
        wanted += (chosen[start:end] - firsts[number] + offset).tolist()
        offset += counts[number]
        characters += sizes[number]
        full = len(trajectories) == VERIFY_EVERY or characters >= JOB_CHARACTERS
        if full or end == len(chosen):
            some = frozenset(wanted) if len(wanted) < offset else None
            here = tuple(sides[number] for number in trajectories)
            elsewhere = tuple(map(repeated, trajectories))
            jobs.append(SampleJob(len(jobs), tuple(trajectories), here, some, characters, elsewhere))
            trajectories, wanted, offset, characters = [], [], 0, 0
    return jobs


def make_parts(
    jobs: Sequence[SampleJob],
    corpus: Corpus,
    renderer: ChatRenderer,
    model_dir: Path,
    config: DatasetsConfig,
    scratch: Path,
) -> Generator[Made, None, None]:
    """What each job makes, in turn, the same for any number of `config.workers`. The files lie in the folder `scratch`,
    and are the caller's to delete.

    Raises TraceForgeError where a worker dies.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    workers = min(config.workers or min(os.cpu_count() or 1, MOST_WORKERS), len(jobs))
    if workers <= 1 or sum(job.characters for job in jobs) < WORTH_WORKERS:
        for job in jobs:
            yield _make(job, corpus, renderer, config.sft, scratch, lambda: False)
        return
    kind = type(renderer.tokenizer)  # a class that came with a model cannot be imported over there
    known = kind if kind.__module__.startswith("transformers.") else None
    model = str(model_dir), known  # what load_renderer takes
    make = partial(_make_in_worker, str(corpus.ingest_dir), model, config.sft, str(scratch))
    when_one_dies = (
        "A process that was tokenising SFT samples died, most likely for want of memory. Set datasets.workers lower "
        "(1: no further processes) and run it again."
    )
    with closing(in_order(make, jobs, workers, when_one_dies)) as results:
        yield from results


def _make(
    job: SampleJob,
    corpus: Corpus,
    renderer: ChatRenderer,
    config: SftDataConfig,
    scratch: Path,
    should_stop: ShouldStop,
) -> Made:
    side_of: dict[str, Side] = {}
    parts = {side: scratch / f"{side}-{job.index:06d}.parquet" for side in SIDES}
    made = Made(parts, [], {})
    dropped: Counter[str] = Counter()

    def read() -> Iterator[Trajectory]:
        for number, side, elsewhere in zip(job.trajectories, job.sides, job.repeated, strict=True):
            trajectory = corpus.at(number)
            turns = learnable_turns(trajectory)
            for place in elsewhere:
                trajectory.messages[turns[place]].trainable = False
            side_of[trajectory.trajectory_id] = side
            yield trajectory

    def keep(number: int) -> bool:
        return job.wanted is None or number in job.wanted

    with ExitStack() as stack:
        writers = {side: stack.enter_context(RowWriter(part, SFT_SCHEMA)) for side, part in parts.items()}
        nth, before = 0, None
        for sample in sft_samples(read(), renderer, config, keep, dropped):
            if should_stop():
                break
            candidate = (sample.trajectory_id, sample.turn)
            nth, before = (nth + 1 if candidate == before else 0), candidate
            side = side_of[sample.trajectory_id]
            writers[side].write(sample.row())
            figures = SampleFigures(side, sample.tokens, sample.learned_tokens, sample.trimmed_messages, nth)
            made.samples.append(figures)
    made.dropped.update(dropped)
    return made


def _make_in_worker(
    ingest_dir: str,
    model: tuple[str, Any],
    config: SftDataConfig,
    scratch: str,
    job: SampleJob,
    should_stop: ShouldStop,
) -> Made:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are taken by the other workers
    corpus, renderer = _opened(ingest_dir, *model)
    return _make(job, corpus, renderer, config, Path(scratch), should_stop)


@lru_cache(maxsize=1)
def _opened(ingest_dir: str, model_dir: str, kind: Any) -> tuple[Corpus, ChatRenderer]:
    opened = Corpus(Path(ingest_dir), groups_kept=2), load_renderer(Path(model_dir), kind)
    gc.freeze()  # a million objects of libraries that garbage collection would look at again and again
    return opened
