"""The stage `datasets`: from ingested trajectories and the model's tokenizer to the two datasets.

    figures = build_datasets(config, {"ingest": run / "ingest", "model": run / "model"}, out_dir)

    sft/{train,held_out}.parquet            samples (see `sft`)
    preference/{train,held_out}.parquet     pairs (see `preference`)
    report.json, report.md                  what they are, what was dropped and why

Two passes over the corpus: the first notes what mining and splitting need (a few hundred bytes a trajectory) and which
turns are in several trajectories (`repeats`: 9 bytes a turn), the second makes the samples; pairs then read the
trajectories they need one case at a time.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from traceforge_core.config import DatasetsConfig, RunConfig
from traceforge_core.datasets.corpus import Corpus
from traceforge_core.datasets.given import given_candidates
from traceforge_core.datasets.pairs import Candidate, Surveyed, outcome_candidates, recovery_candidates, survey
from traceforge_core.datasets.parquet import PREFERENCE_SCHEMA, RowWriter
from traceforge_core.datasets.preference import preference_pairs
from traceforge_core.datasets.refusal import refuse_empty
from traceforge_core.datasets.repeats import Repeats, TurnKeys, turn_keys
from traceforge_core.datasets.report import DatasetReport
from traceforge_core.datasets.sample import learnable_turns
from traceforge_core.datasets.sampled import sampled_candidates
from traceforge_core.datasets.sft import candidate_turns
from traceforge_core.datasets.sft_files import write_samples
from traceforge_core.datasets.sft_jobs import Made, SampleJob, make_parts, plan
from traceforge_core.datasets.splits import SIDES, Side, split_cases
from traceforge_core.errors import page
from traceforge_core.modeling.chat import ChatRenderer, load_renderer
from traceforge_core.runs.progress import ProgressFile, progress

log = logging.getLogger(__name__)
LOG_EVERY = 500
T = TypeVar("T")


def build_datasets(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> dict[str, Any]:
    """Write both datasets and their report; the figures are counts, token numbers and reasons.

    Raises TraceForgeError where there is nothing to train on: no SFT sample, or no pair, with the counts by reason.
    """
    settings = config.datasets
    corpus = Corpus(inputs["ingest"])
    renderer = load_renderer(inputs["model"])
    report = DatasetReport(settings)

    records, counts, repeats = _survey(corpus, settings, out_dir, report)
    report.dropped_pairs["recovery: refers to what the prompt does not show"] += sum(
        record.refused_recoveries for record in records
    )
    with progress(out_dir, "collecting given and drawn pairs"):
        ready = _ready(config, corpus, renderer, inputs["model"], report)
    cases = {record.case for record in records} | {candidate.case for found in ready.values() for candidate in found}
    alike = {(records[one].case, records[other].case) for one, other in repeats.links}
    side_of = split_cases(cases, settings.split, alike)

    sizes = [record.head_size + record.completion_size for record in records]
    sides = [side_of(record.case) for record in records]
    scratch = out_dir / ".samples"

    def make(chosen: npt.NDArray[np.int64]) -> Generator[tuple[int, Made], None, None]:
        jobs = plan(chosen, counts, sizes, sides, repeats.of)
        with closing(make_parts(jobs, corpus, renderer, inputs["model"], settings, scratch)) as parts:
            yield from ((_turns(job, counts), made) for job, made in zip(jobs, parts, strict=True))

    write_samples(sum(counts), make, settings.sft.max_samples, out_dir, report)
    shutil.rmtree(scratch, ignore_errors=True)
    with progress(out_dir, "making preference pairs", "cases", len(cases)) as told:
        by_case = _by_case(records, corpus, ready, settings, report)
        _write_pairs(by_case, renderer, settings, side_of, out_dir, report, told)
    _warn_beyond_context(report, inputs["model"])
    figures = report.write(out_dir, alike)
    refuse_empty(report, records, settings)
    return figures


def _ready(
    config: RunConfig, corpus: Corpus, renderer: ChatRenderer, model_dir: Path, report: DatasetReport
) -> dict[str, list[Candidate]]:
    """Candidates of the miners that do not work from the survey: a file, and the current policy."""
    preference = config.datasets.preference
    ready: dict[str, list[Candidate]] = {}
    if "given" in preference.miners and preference.given:
        ready["given"] = list(given_candidates(Path(preference.given), report.dropped_pairs))
    if "sampled" in preference.miners:
        from traceforge_core.datasets.drawing import draw

        ready["sampled"] = sampled_candidates(
            corpus, renderer, preference, lambda prompts: draw(config, model_dir, prompts), report.dropped_pairs
        )
    return ready


def _survey(
    corpus: Corpus, settings: DatasetsConfig, out_dir: Path, report: DatasetReport
) -> tuple[list[Surveyed], list[int], Repeats]:
    """What mining needs of every trajectory, how many SFT samples each could make, and what repeats what."""
    miners = settings.preference.miners
    within = settings.preference.recovery_within if "recovery" in miners else 0
    records, counts, formats = [], [], []
    keys = TurnKeys()
    with progress(out_dir, "looking through the corpus", "trajectories", corpus.count) as told:
        for number, trajectory in enumerate(corpus):
            turns = learnable_turns(trajectory)
            own = turn_keys(trajectory, turns)
            records.append(survey(number, trajectory, within, dict(zip(turns, own, strict=True))))
            counts.append(len(candidate_turns(trajectory, settings.sft)))
            keys.add(own, counts[-1] > 0)
            formats.append(sys.intern(trajectory.format))
            told.add()
    repeats = keys.settle()
    if settings.sft.repeated_turns == "every":  # known all the same, for the split
        repeats = replace(repeats, repeated=np.zeros_like(repeats.repeated))
    for number, count in enumerate(counts):
        if count and (elsewhere := len(repeats.of(number))):
            learnable = repeats.turns(number)
            report.add_repeats(formats[number], elsewhere, learnable)
            left = learnable - elsewhere
            counts[number] = left if settings.sft.style == "blocks" else min(left, 1)
    log.info("%d trajectories, %d possible SFT samples", len(records), sum(counts))
    return records, counts, repeats


def _turns(job: SampleJob, counts: list[int]) -> int:
    """How many turns a job tries."""
    return sum(counts[number] for number in job.trajectories) if job.wanted is None else len(job.wanted)


def _write_pairs(
    by_case: Iterator[tuple[str, list[list[Candidate]]]],
    renderer: ChatRenderer,
    settings: DatasetsConfig,
    side_of: Callable[[str], Side],
    out_dir: Path,
    report: DatasetReport,
    told: ProgressFile,
) -> None:
    with ExitStack() as stack:
        writers = {
            side: stack.enter_context(RowWriter(out_dir / "preference" / f"{side}.parquet", PREFERENCE_SCHEMA))
            for side in SIDES
        }
        pairs = preference_pairs(_counted(by_case, told), renderer, settings.preference, report.dropped_pairs)
        for number, pair in enumerate(pairs, 1):
            side = side_of(pair.case)
            writers[side].write(pair.row())
            report.add_pair(side, pair)
            told.add(0, pairs=1)
            if number % LOG_EVERY == 0:
                log.info("%d pairs written", number)


def _counted(items: Iterable[T], told: ProgressFile) -> Iterator[T]:
    """The same, each told as done when the next one is asked for."""
    for item in items:
        yield item
        told.add()


def _by_case(
    records: list[Surveyed],
    corpus: Corpus,
    ready: Mapping[str, list[Candidate]],
    settings: DatasetsConfig,
    report: DatasetReport,
) -> Iterator[tuple[str, list[list[Candidate]]]]:
    """Each case with its candidates, one list a miner in the configured order; the candidates are counted."""
    grouped: defaultdict[str, list[Surveyed]] = defaultdict(list)
    by_miner: defaultdict[tuple[str, str], list[Candidate]] = defaultdict(list)
    seen: set[tuple[int, int]] = set()
    for record in records:
        grouped[record.case].append(record)
    for miner, candidates in ready.items():
        for candidate in candidates:
            by_miner[miner, candidate.case].append(candidate)
    for case in sorted(grouped.keys() | {case for _, case in by_miner}):
        of_case = grouped[case]
        lists = []
        for miner in settings.preference.miners:
            if miner == "outcome":
                lists.append(list(outcome_candidates(of_case, corpus)))
            elif miner == "recovery":
                lists.append(list(recovery_candidates(of_case, corpus, seen)))
                again = sum(len(record.recoveries) for record in of_case) - len(lists[-1])
                report.candidates[miner] += again
                report.dropped_pairs["duplicate of a pair"] += again
            else:
                lists.append(by_miner[miner, case])
            report.candidates[miner] += len(lists[-1])
        yield case, lists


def _warn_beyond_context(report: DatasetReport, model_dir: Path) -> None:
    facts = model_dir / "model.json"
    longest = json.loads(facts.read_text(encoding="utf-8")).get("longest") if facts.is_file() else None
    for what, count in report.longer_than(longest).items() if longest else ():
        if count:
            log.warning(
                "%d %s are longer than the model's own context of %s tokens. %s",
                count, what, f"{longest:,}", page("pairs-too-long"),
            )  # fmt: skip
