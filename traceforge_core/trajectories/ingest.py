"""The stage `ingest`: a folder of trajectory files to canonical trajectories, with exact counts.

    figures = ingest(config, {}, out_dir)

Writes `trajectories/part-*.parquet` (store.py), `quarantine.jsonl` (what was set aside: source, reason, detail) and
`report.json`. Counted in trajectories, found = read + quarantined + duplicates; a file that cannot be read counts as
one. The corpus is read in shards (shards.py), one file at a time; what stays in memory of a trajectory is a hash and
its name. An ingest that was interrupted goes on with the shards that are missing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

import orjson

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.paths import written
from traceforge_core.runs import write_json
from traceforge_core.runs.progress import progress
from traceforge_core.trajectories import outcomes
from traceforge_core.trajectories.outcome_files import read_table
from traceforge_core.trajectories.parsing import DATA_SUFFIXES
from traceforge_core.trajectories.report import Report
from traceforge_core.trajectories.shards import SHARD_BYTES, ShardJob, Summary, local_processes, plan
from traceforge_core.trajectories.store import FOLDER, TrajectoryWriter, read_rows
from traceforge_core.trajectories.survey import Corpus, find_outcomes, survey
from traceforge_core.trajectories.values import split

RunJobs = Callable[[Sequence[ShardJob]], Iterable[Summary]]


def ingest(
    config: RunConfig, inputs: Mapping[str, Path], out_dir: Path, run_jobs: RunJobs | None = None
) -> dict[str, Any]:
    """Read the corpus of `config.ingest` into `out_dir`. Returns the counts.

    `run_jobs` reads the shards and gives their summaries in order (shards.read_shard does one); by default processes on
    this machine do. Raises TraceForgeError where there is nothing to read.
    """
    if config.ingest.cluster != "none" and run_jobs is None:
        raise TraceForgeError(
            f"ingest.cluster={config.ingest.cluster} is Prefect's business (tasks/cluster.py): run the flow, give "
            "`run_jobs`, or set ingest.cluster=none."
        )
    with progress(out_dir, "looking for trajectory files"):
        corpus = survey(corpus_folder(config.ingest.path))
    if not corpus.units and not corpus.unreadable:
        raise TraceForgeError(
            f"No trajectory files in {corpus.root} ({_seen(corpus)}). Set ingest.path to a folder that holds some "
            f"({', '.join(DATA_SUFFIXES)}, also packed as .gz or .zst)."
        )
    verdicts, outcome_files = _collect_outcomes(corpus, config.ingest.outcomes)
    jobs = _jobs(corpus, verdicts, out_dir / ".shards")
    workers = config.ingest.workers or os.cpu_count() or 1
    report = Report()
    texts: dict[str, Counter[str]] = {}
    final = out_dir / FOLDER
    shutil.rmtree(final, ignore_errors=True)
    final.mkdir(parents=True)
    with (out_dir / "quarantine.jsonl").open("wb") as quarantine, ExitStack() as done:
        for problem in corpus.unreadable:
            _set_aside(
                {"source": problem.source, "reason": problem.reason, "detail": problem.detail}, quarantine, report
            )
        fresh = {job.index for job in jobs if not job.is_done()}
        earlier = sum(job.bytes for job in jobs if job.index not in fresh)
        everything = sum(job.bytes for job in jobs)
        told = done.enter_context(progress(out_dir, "reading trajectories", "bytes", everything, earlier))
        summaries = run_jobs(jobs) if run_jobs else local_processes(jobs, workers)
        for job, summary in zip(jobs, summaries, strict=True):
            for row in summary.quarantine:
                _set_aside(row, quarantine, report)
            report.conflicts += summary.conflicts
            for name, counts in summary.texts.items():
                texts.setdefault(name, Counter()).update(counts)
            kept = [report.add(entry) for entry in summary.rows]
            _take_over(job, kept, final)
            if job.index in fresh:
                told.add(job.bytes, files=sum(len(unit.paths) for unit in job.units), trajectories=len(summary.rows))
                told.write()
                job.progress.unlink(missing_ok=True)
    if not any(final.iterdir()):
        TrajectoryWriter(final).close()
    shutil.rmtree(out_dir / ".shards")
    figures = report.figures() | {
        "files": sum(len(unit.paths) for unit in corpus.units),
        "bytes": sum(unit.bytes for unit in corpus.units),
        "shards": len(jobs),
        "outcome_files": outcome_files,
        "texts_compared": {name: dict(counts.most_common(30)) for name, counts in sorted(texts.items())},
        "other_files": dict(corpus.other_files.most_common()),
    }
    write_json(out_dir / "report.json", figures)
    return figures


def refuse_nothing_read(figures: Mapping[str, Any], out_dir: Path) -> None:
    """Raise TraceForgeError where an ingest, finished in `out_dir`, found trajectories and could read none of them."""
    if figures.get("read") != 0:
        return
    reasons = ", ".join(f"{reason} {count}" for reason, count in figures["by_reason"].items())
    quarantine = out_dir / "quarantine.jsonl"
    with quarantine.open("rb") as file:
        first = orjson.loads(file.readline() or b"{}")
    example = f" The first: {first['source']}: {first['detail']}." if first else ""
    raise TraceForgeError(
        f"Nothing could be read: {figures['found']} found, all set aside ({reasons}).{example} All of them, with "
        f"reasons: {quarantine}. Set ingest.path to trajectories in a known format (docs/your-data.md)."
    )


def corpus_folder(path: str) -> Path:
    """The folder or file that `ingest.path` means; `samples` is what TraceForge ships. Raises TraceForgeError."""
    shipped = resources.files("traceforge_core") / "samples" / "data"
    folder = Path(str(shipped)) if path == "samples" else written(path)
    if not folder.exists():
        raise TraceForgeError(
            f"There is no folder or file {folder} (ingest.path). Give the path of your trajectories, or `samples`."
        )
    return folder


def _jobs(corpus: Corpus, verdicts: outcomes.Outcomes, folder: Path) -> list[ShardJob]:
    """The shards to read. What an earlier attempt left in the folder is used only if it is of the same corpus."""
    told = verdicts.to_json()
    parts = [part for unit in corpus.units for part in split(corpus.root, unit, SHARD_BYTES)]
    plan_of_work = plan(parts)
    digest = hashlib.blake2b(told.encode(), digest_size=16)
    for unit in parts:
        times = [_changed(corpus.root / path) for path in unit.paths]
        digest.update(repr((unit, times)).encode("utf-8", "surrogateescape"))
    name = digest.hexdigest()
    if folder.is_dir() and not (folder / name).is_file():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("*.progress.json"):  # by an attempt that was killed
        left.unlink()
    (folder / name).write_text(told, encoding="utf-8")
    root = str(corpus.root.resolve())
    return [
        ShardJob(index, root, units, str(folder.resolve()), str((folder / name).resolve()))
        for index, units in enumerate(plan_of_work)
    ]


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _take_over(job: ShardJob, kept: list[bool], final: Path) -> None:
    """Bring a shard's part into the result: as it is, or written anew without the rows that were there before."""
    part = final / job.part.name
    if all(kept) and kept:
        try:
            os.link(job.part, part)
        except OSError:
            shutil.copyfile(job.part, part)
    elif any(kept):
        with TrajectoryWriter(final, first_part=job.index, one_part=True) as writer:
            for row, keep in zip(read_rows([job.part]), kept, strict=True):
                if keep:
                    writer.write_row(row)


def _collect_outcomes(corpus: Corpus, more: list[str]) -> tuple[outcomes.Outcomes, dict[str, dict[str, int]]]:
    """Every outcome file of the corpus and of `ingest.outcomes`, and how many labels each of them gives."""
    verdicts = outcomes.Outcomes(list(corpus.paths()))
    counts: dict[str, dict[str, int]] = {}
    found = dict(corpus.outcome_files)
    for name in more:
        path = written(name).resolve()
        if not path.exists():
            raise TraceForgeError(f"There is no file or folder {path} (ingest.outcomes). Mend or remove the entry.")
        if path.is_file() and path.suffix.lower() in (".csv", ".tsv", ".jsonl"):
            table = read_table(path)
            for case, run, label in table:
                verdicts.state(case, run, label, path.name)
            counts[path.as_posix()] = dict(Counter(label for _, _, label in table))
            continue
        outside = find_outcomes(path)
        if not outside:
            raise TraceForgeError(
                f"{path} (ingest.outcomes) holds no outcomes that TraceForge knows: SWE-bench run reports "
                "(resolved_ids, ...), per-instance reports, or a CSV or JSONL table of case, run, resolved."
            )
        found |= outside
    for source, claims in sorted(found.items()):
        verdicts.add(source, claims)
        counts[source] = dict(Counter(claim.label for claim in claims))
    verdicts.settle(corpus.paths())
    return verdicts, counts


def _set_aside(row: dict[str, str], file: Any, report: Report) -> None:
    file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    report.by_reason[row["reason"]] += 1


def _seen(corpus: Corpus) -> str:
    if corpus.outcome_files or corpus.other_files:
        return f"outcome files: {len(corpus.outcome_files)}, other files: {corpus.other_files.total()}"
    return "it is empty"
