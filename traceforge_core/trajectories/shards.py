"""The corpus in shards: each is read in one go, by whichever process, and leaves its results whole or not at all.

    for summary in local_processes(jobs, workers=2):
        ...

A job is small, picklable and self-contained, so that it can also be sent to another machine that sees the same files. A
finished shard is one Parquet part and a summary beside it; a shard whose summary is there is not read again.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from traceforge_core.processes.in_order import in_order
from traceforge_core.runs import write_json
from traceforge_core.runs.progress import ProgressFile
from traceforge_core.trajectories import outcome_files, outcomes
from traceforge_core.trajectories.coverage import Comparison, compare
from traceforge_core.trajectories.model import Trajectory
from traceforge_core.trajectories.reading import read_unit
from traceforge_core.trajectories.redaction import redact
from traceforge_core.trajectories.report import Entry
from traceforge_core.trajectories.store import TrajectoryWriter, encode_messages
from traceforge_core.trajectories.survey import Quarantined, Unit, label_of

log = logging.getLogger(__name__)

SHARD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ShardJob:
    """One shard to read: units below `root`, results into `folder`, outcomes from the file `verdicts`."""

    index: int
    root: str
    units: tuple[Unit, ...]
    folder: str
    verdicts: str

    @property
    def part(self) -> Path:
        return Path(self.folder, f"part-{self.index:05d}.parquet")

    @property
    def summary(self) -> Path:
        return Path(self.folder, f"shard-{self.index:05d}.json")

    @property
    def progress(self) -> Path:
        return Path(self.folder, f"shard-{self.index:05d}.progress.json")

    @property
    def bytes(self) -> int:
        """Size of the files to read."""
        return sum(unit.bytes for unit in self.units)

    def is_done(self) -> bool:
        """Whether it has been read, by this attempt or an earlier one."""
        return self.summary.is_file() and self.part.is_file()


@dataclass(slots=True)
class Summary:
    """What a shard held: `rows` in the order of its Parquet part, `quarantine` in reading order. `texts` says, for one
    file of each format, how many of its texts were found again, left out (by reason), or lost (by path)."""

    rows: list[Entry]
    quarantine: list[dict[str, str]]
    conflicts: list[dict[str, str]]
    texts: dict[str, dict[str, int]]


def plan(units: Sequence[Unit], shard_bytes: int = SHARD_BYTES) -> list[tuple[Unit, ...]]:
    """Consecutive units, about `shard_bytes` of files together. The same corpus gives the same shards."""
    shards: list[tuple[Unit, ...]] = []
    current: list[Unit] = []
    size = 0
    for unit in units:
        current.append(unit)
        size += unit.bytes
        if size >= shard_bytes:
            shards.append(tuple(current))
            current, size = [], 0
    if current:
        shards.append(tuple(current))
    return shards


def read_shard(job: ShardJob, should_stop: Callable[[], bool] = lambda: False) -> Summary | None:
    """Read one shard, unless it has been read before. None where `should_stop` said so in the middle of it."""
    if (done := load_summary(job)) is not None:
        return done
    verdicts = _verdicts(job.verdicts)
    summary = Summary([], [], [], {})
    compared: dict[str, Comparison] = {}

    def compare_one_a_format(value: Any, trajectories: list[Trajectory]) -> None:
        if trajectories[0].format not in compared:
            compared[trajectories[0].format] = compare(value, trajectories)

    # A folder of its own: a cluster may give a shard to a second machine while the first still reads it.
    scratch = Path(tempfile.mkdtemp(prefix=f".scratch-{job.index:05d}-", dir=job.folder))
    told = ProgressFile(job.progress, "reading", "bytes")
    with TrajectoryWriter(scratch, one_part=True) as writer:
        for unit in job.units:
            if should_stop():
                return None
            for item in read_unit(Path(job.root), unit, compare_one_a_format):
                if isinstance(item, Quarantined):
                    summary.quarantine.append(asdict(item))
                else:
                    _write(item, label_of(unit.paths[0]), verdicts, writer, summary)
                    told.add(0, trajectories=1)
            told.add(unit.bytes, files=len(unit.paths))
    summary.texts = {name: result.counts() for name, result in compared.items()}
    write_json(scratch / "summary.json", asdict(summary))
    (scratch / "part-00000.parquet").replace(job.part)
    (scratch / "summary.json").replace(job.summary)
    scratch.rmdir()
    return summary


def load_summary(job: ShardJob) -> Summary | None:
    """The summary of a shard that has been read, or None."""
    try:
        raw = orjson.loads(job.summary.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    if not job.part.is_file():
        return None
    return Summary([Entry(**row) for row in raw["rows"]], raw["quarantine"], raw["conflicts"], raw["texts"])


def local_processes(jobs: Sequence[ShardJob], workers: int) -> Iterator[Summary]:
    """The shards' summaries in order, read by that many processes on this machine (in this process where one is
    enough).

    Raises TraceForgeError where a process dies; what was finished until then is kept.
    """
    if workers <= 1 or len(jobs) <= 1:
        for job in jobs:
            summary = read_shard(job)
            assert summary is not None
            yield summary
        return
    when_one_dies = (
        "A process that was reading trajectories died, most likely for want of memory. Set ingest.workers lower and "
        "run it again; the shards that were finished are kept."
    )
    with closing(in_order(read_shard, jobs, min(workers, len(jobs)), when_one_dies)) as summaries:
        for number, summary in enumerate(summaries, 1):
            log.info("read shard %d of %d", number, len(jobs))
            assert summary is not None
            yield summary


def content_hash(trajectory: Trajectory, messages: bytes) -> str:
    """Equal for trajectories that say the same: same messages, same tools."""
    digest = hashlib.blake2b(messages, digest_size=16)
    digest.update(b"\0" + orjson.dumps(trajectory.tools, option=orjson.OPT_SORT_KEYS))
    return digest.hexdigest()


def identify(trajectory: Trajectory, digest: str) -> str:
    """A name that is unique in the corpus and the same whenever the same file is read again."""
    own = hashlib.blake2b(f"{trajectory.source}\0{digest}".encode(), digest_size=6).hexdigest()
    return f"{trajectory.case}--{own}"


def label(trajectory: Trajectory, path: str, verdicts: outcomes.Outcomes) -> tuple[bool, str | None]:
    """Give a trajectory its outcome, from what the outcome files and its own row say.

    Returns (whether it ended for reasons of infrastructure, what contradicts what).
    """
    decision = verdicts.decide(trajectory.case, trajectory.run, path)
    conflict = decision.conflict
    if decision.label and trajectory.outcome and decision.label != trajectory.outcome:
        conflict = f"{decision.label} in {decision.source}; {trajectory.outcome} in {trajectory.outcome_source}"
    if conflict:
        trajectory.outcome = trajectory.outcome_source = None
    elif decision.label:
        trajectory.outcome, trajectory.outcome_source = decision.label, decision.source
    infrastructure = outcome_files.is_infrastructure(trajectory.exit_status) or not trajectory.turns
    if infrastructure:
        trajectory.outcome = trajectory.outcome_source = None
    return infrastructure, conflict


def _write(
    trajectory: Trajectory, path: str, verdicts: outcomes.Outcomes, writer: TrajectoryWriter, summary: Summary
) -> None:
    try:
        messages = encode_messages(trajectory.messages)
        messages, secrets = redact(trajectory.messages, messages)
        digest = content_hash(trajectory, messages)
    except (TypeError, orjson.JSONEncodeError) as error:  # what Parquet rows may hold: dates, bytes, decimals
        told = f"nested too deep to be kept: {error}" if "Recursion" in str(error) else str(error)
        summary.quarantine.append(asdict(Quarantined(trajectory.source, "not_json", told)))
        return
    if secrets:
        trajectory.left_out = {**trajectory.left_out, "secret_replaced": secrets}
    infrastructure, conflict = label(trajectory, path, verdicts)
    if conflict:
        summary.conflicts.append({"source": trajectory.source, "conflict": conflict})
    trajectory.trajectory_id = identify(trajectory, digest)
    writer.write(trajectory, messages)
    turns = [message for message in trajectory.messages if message.role == "assistant"]
    summary.rows.append(
        Entry(
            digest=digest,
            source=trajectory.source,
            format=trajectory.format,
            outcome=trajectory.outcome,
            exit_status=trajectory.exit_status,
            turns=len(turns),
            turns_without_action=sum(not turn.actions for turn in turns),
            infrastructure=infrastructure,
            left_out=trajectory.left_out,
        )
    )


@lru_cache(maxsize=1)
def _verdicts(path: str) -> outcomes.Outcomes:
    """The outcomes that `ingest` wrote for its shards."""
    return outcomes.Outcomes.from_json(Path(path).read_text(encoding="utf-8"))
