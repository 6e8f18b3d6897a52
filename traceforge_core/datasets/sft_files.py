"""The files of SFT samples: all that can be made, or `max_samples` of them, spread evenly.

    write_samples(candidates, make, config.datasets.sft.max_samples, out_dir, report)

A candidate is a turn (style `blocks`), which makes one sample at most, or a trajectory (`native`), which makes as many
as it takes. So that a few long trajectories do not take the places of all others, each gives its first sample (the one
with its last turns) before any gives a second, each its second before any gives a third.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import numpy.typing as npt

from traceforge_core.datasets.budget import spread
from traceforge_core.datasets.joining import JoinedFile
from traceforge_core.datasets.parquet import SFT_SCHEMA, select_rows
from traceforge_core.datasets.report import DatasetReport
from traceforge_core.datasets.sft_jobs import Made, SampleFigures
from traceforge_core.datasets.splits import SIDES, Side
from traceforge_core.runs.progress import progress

log = logging.getLogger(__name__)
LOG_EVERY = 500


def write_samples(
    candidates: int,
    make: Callable[[npt.NDArray[np.int64]], Generator[tuple[int, Made], None, None]],
    max_samples: int | None,
    out_dir: Path,
    report: DatasetReport,
) -> None:
    """Write the samples. Where `max_samples` asks for fewer than there could be, candidates spread evenly over the
    corpus are tried first, and more of them in the place of those that do not fit. `make` gives, for candidates by
    number, how many of them each part of the work is about, and what it made of them. What is left is counted:
    candidates that were not tried, and samples that were made and not kept."""
    wanted = max_samples or sys.maxsize
    untried, tries = np.arange(candidates), min(wanted, candidates)
    tried = made_of_them = 0
    further: list[Made] = []
    with ExitStack() as stack:
        files = _Files(stack, out_dir, report)
        while len(untried) and files.written < wanted:
            take = spread(len(untried), tries)
            chosen = np.fromiter(map(take, range(len(untried))), bool, len(untried))
            told = stack.enter_context(progress(out_dir, "making SFT samples", "turns", int(chosen.sum())))
            with closing(make(untried[chosen])) as parts:
                for turns, made in parts:
                    report.dropped_samples.update(made.dropped)  # also beyond `wanted`: the same in every process
                    tried, made_of_them = tried + turns, made_of_them + len(made.samples)
                    room = wanted - files.written
                    kept = _first_ones(made.samples, room) if max_samples else [True] * len(made.samples)
                    files.add(made, kept)
                    told.add(turns, samples=sum(kept))
                    if max_samples and any(sample.nth for sample in made.samples):
                        further.append(_put_aside(made, len(further)))
                    else:
                        _remove(made)
                    if files.written == wanted:
                        break
            untried = untried[~chosen]
            tries *= 2  # each round reads the corpus again: few of them, even where hardly anything fits
        for made, kept in zip(further, _level_by_level(further, wanted - files.written), strict=True):
            files.add(made, kept)
            _remove(made)
    del report.dropped_samples["over max_samples"]
    # Not what is missing of the candidates: a trajectory of style `native` is one, and may make many samples.
    if left := candidates - tried + made_of_them - files.written:
        report.dropped_samples["over max_samples"] = left


def _first_ones(samples: Sequence[SampleFigures], room: int) -> list[bool]:
    """Which are the first of their candidate, as far as there is room."""
    kept = []
    for sample in samples:
        kept.append(sample.nth == 0 and room > 0)
        room -= kept[-1]
    return kept


def _level_by_level(further: Sequence[Made], room: int) -> list[list[bool]]:
    """Which of what was put aside fill the room: all second samples before any third, spread evenly where not all of
    them find a place."""
    there = Counter(sample.nth for made in further for sample in made.samples)
    takes = {}
    for nth in sorted(there.keys() - {0}):
        takes[nth] = spread(there[nth], room)
        room -= min(room, there[nth])
    met: Counter[int] = Counter()
    kept: list[list[bool]] = []
    for made in further:
        kept.append([])
        for sample in made.samples:
            kept[-1].append(sample.nth > 0 and takes[sample.nth](met[sample.nth]))
            met[sample.nth] += 1
    return kept


class _Files:
    """Both sides' files; `written` samples are in them."""

    def __init__(self, stack: ExitStack, out_dir: Path, report: DatasetReport) -> None:
        self._files = {
            side: stack.enter_context(JoinedFile(out_dir / "sft" / f"{side}.parquet", SFT_SCHEMA)) for side in SIDES
        }
        self._report = report
        self.written = 0

    def add(self, made: Made, kept: Sequence[bool]) -> None:
        """Add those samples of a part that are kept. Its own files stay as they are."""
        if not any(kept):
            return
        of_side: dict[Side, list[bool]] = {side: [] for side in SIDES}
        for sample, keep in zip(made.samples, kept, strict=True):
            of_side[sample.side].append(keep)
            if keep:
                self._report.add_sample(sample)
        for side, part in made.parts.items():
            if all(of_side[side]):
                self._files[side].append(part)
                continue
            some = part.with_suffix(".some")
            select_rows(part, of_side[side], some)
            self._files[side].append(some)
            some.unlink()
        before, self.written = self.written, self.written + sum(kept)
        if self.written // LOG_EVERY > before // LOG_EVERY:
            log.info("%d SFT samples written", self.written)


def _put_aside(made: Made, number: int) -> Made:
    """The same under a name that no later part has."""
    aside = {side: part.with_name(f"further-{number}-{side}.parquet") for side, part in made.parts.items()}
    return Made({side: part.rename(aside[side]) for side, part in made.parts.items()}, made.samples, made.dropped)


def _remove(made: Made) -> None:
    for part in made.parts.values():
        part.unlink()
