"""SFT samples of a whole corpus: in this process, or in several for a corpus that is worth their start.

    jobs = plan(chosen, counts, sizes)
    for samples in samples_of(jobs, corpus, renderer, model_dir, config.datasets, scratch, dropped):
        for sample in samples: ...

A job is some consecutive trajectories with what is wanted of them. It makes the same samples in whichever process, so
that the dataset does not depend on how many there are. A worker writes a job's samples to an Arrow file, which is read
one batch at a time and deleted: memory stays flat however large the samples are.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traceforge_core.config import DatasetsConfig, SftDataConfig
from traceforge_core.datasets.corpus import Corpus
from traceforge_core.datasets.parquet import SFT_SCHEMA, RowWriter
from traceforge_core.datasets.sft import VERIFY_EVERY, SftSample, sft_samples
from traceforge_core.modeling.chat import ChatRenderer, load_renderer
from traceforge_core.processes.in_order import ShouldStop, in_order

JOB_CHARACTERS = 16 << 20
WORTH_WORKERS = 32 << 20
"""Characters of text from which on workers pay: they start in about two seconds of a core each, which tokenises some
two to four million characters."""
MOST_WORKERS = 8
"""As many as one process can write the samples of."""


@dataclass(frozen=True, slots=True)
class SampleJob:
    """`trajectories` are positions in the corpus; `wanted` are the candidates to make (sft.candidate_turns), numbered
    over all of these trajectories, or None for all. `characters` is how much text they are."""

    index: int
    trajectories: tuple[int, ...]
    wanted: frozenset[int] | None
    characters: int


def plan(chosen: npt.NDArray[np.int64], counts: Sequence[int], sizes: Sequence[int]) -> list[SampleJob]:
    """Jobs for the candidates `chosen` (numbers over the whole corpus, ascending; int64), where trajectory n has
    `counts[n]` candidates and `sizes[n]` characters."""
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
            jobs.append(SampleJob(len(jobs), tuple(trajectories), some, characters))
            trajectories, wanted, offset, characters = [], [], 0, 0
    return jobs


def samples_of(
    jobs: Sequence[SampleJob],
    corpus: Corpus,
    renderer: ChatRenderer,
    model_dir: Path,
    config: DatasetsConfig,
    scratch: Path,
    dropped: Counter[str],
) -> Generator[Iterator[SftSample], None, None]:
    """The samples of each job in turn, the same for any number of `config.workers`. What is not made is counted in
    `dropped` by reason. `scratch` is a folder for what workers hand over.

    Raises TraceForgeError where a worker dies.
    """
    workers = min(config.workers or min(os.cpu_count() or 1, MOST_WORKERS), len(jobs))
    if workers <= 1 or sum(job.characters for job in jobs) < WORTH_WORKERS:
        for job in jobs:
            yield _make(job, corpus, renderer, config.sft, dropped)
        return
    scratch.mkdir(parents=True, exist_ok=True)
    make = partial(_make_in_worker, str(corpus.ingest_dir), str(model_dir), config.sft, str(scratch))
    when_one_dies = (
        "A process that was tokenising SFT samples died, most likely for want of memory. Set datasets.workers lower "
        "(1: no further processes) and run it again."
    )
    with closing(in_order(make, jobs, workers, when_one_dies)) as results:
        for job, reasons in zip(jobs, results, strict=True):
            dropped.update(reasons)
            yield _read(_file_of(job, scratch))


def _make(
    job: SampleJob, corpus: Corpus, renderer: ChatRenderer, config: SftDataConfig, dropped: Counter[str]
) -> Iterator[SftSample]:
    def keep(number: int) -> bool:
        return job.wanted is None or number in job.wanted

    return sft_samples((corpus.at(number) for number in job.trajectories), renderer, config, keep, dropped)


def _make_in_worker(
    ingest_dir: str, model_dir: str, config: SftDataConfig, scratch: str, job: SampleJob, should_stop: ShouldStop
) -> dict[str, int]:
    """Write a job's samples. Returns what was not made."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are taken by the other workers
    corpus, renderer = _opened(ingest_dir, model_dir)
    dropped: Counter[str] = Counter()
    with RowWriter(_file_of(job, Path(scratch)), SFT_SCHEMA) as writer:
        for sample in _make(job, corpus, renderer, config, dropped):
            if should_stop():
                break
            writer.write(sample.row())
    return dict(dropped)


@lru_cache(maxsize=1)
def _opened(ingest_dir: str, model_dir: str) -> tuple[Corpus, ChatRenderer]:
    return Corpus(Path(ingest_dir), groups_kept=2), load_renderer(Path(model_dir))


def _file_of(job: SampleJob, scratch: Path) -> Path:
    return scratch / f"samples-{job.index:06d}.arrow"


def _read(path: Path) -> Iterator[SftSample]:
    """The samples of a worker's file, which is then deleted."""
    with pa.memory_map(str(path)) as source:
        batches = pa.ipc.open_file(source)
        for number in range(batches.num_record_batches):
            batch = batches.get_batch(number)
            plain = [name for name in SftSample.__slots__ if name not in ("input_ids", "labels")]
            values = {name: batch.column(name).to_pylist() for name in plain}
            ids, labels = (batch.column(name) for name in ("input_ids", "labels"))
            borders = ids.offsets.to_numpy().tolist()
            ids, labels = ids.values.to_numpy(), labels.values.to_numpy()
            for row in range(batch.num_rows):
                here = slice(borders[row], borders[row + 1])
                own = {name: column[row] for name, column in values.items()}
                yield SftSample(**own, input_ids=ids[here], labels=labels[here])
    path.unlink()
