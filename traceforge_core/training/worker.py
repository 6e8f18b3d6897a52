"""One worker process of a training stage: `python -m traceforge_core.training.worker JOB.json`.

The launcher starts one a rank; on several hosts torchrun does (`traceforge_core.training.hosts`).

A worker ends with status 0 when its training is done and what it had to save is saved.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from traceforge_core.errors import TraceForgeError
from traceforge_core.processes.bound import end_with
from traceforge_core.runs.progress import FILE_NAME, ProgressFile
from traceforge_core.runs.stopping import StoppedByFile
from traceforge_core.training.job import Job
from traceforge_core.training.known_errors import explain
from traceforge_core.training.trackers import finish_trackers
from traceforge_core.training.watch import STOPPED_STATUS

logger = logging.getLogger("traceforge_core.training.worker")
LOST_PEER_WORDS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")


@dataclass(frozen=True, slots=True)
class Seat:
    """Where this worker sits. scratch: the launcher's folder for signs of life; None on a host that has no launcher.
    told: where rank 0 says what it is doing, for people."""

    rank: int
    scratch: Path | None
    told: ProgressFile | None = None

    def beat(self, doing: str) -> None:
        """Show a sign of life. `doing` ends up in the error if it was the last; start it with "waiting" where this
        worker depends on another."""
        if self.scratch is not None:
            (self.scratch / f"beat{self.rank}").write_text(doing, encoding="utf-8")
        if self.told is not None:
            self.told.doing(doing)

    def doing(self) -> str:
        """The last sign of life."""
        with contextlib.suppress(OSError):
            if self.scratch is not None:
                return (self.scratch / f"beat{self.rank}").read_text(encoding="utf-8")
        return "at work"

    def report(self, error: BaseException) -> None:
        """Leave the reason of a failure for the launcher."""
        if self.scratch is None:
            return
        message = str(error) or type(error).__name__
        what = {
            "message": message if isinstance(error, TraceForgeError) else f"{type(error).__name__}: {message}",
            "for_people": isinstance(error, TraceForgeError),
            "stopped": isinstance(error, StoppedByFile),
            "lost_peer": any(words in message for words in LOST_PEER_WORDS)
            or "DistBackendError" in type(error).__name__,
            "time": time.time(),
        }
        (self.scratch / f"error{self.rank}.json").write_text(json.dumps(what), encoding="utf-8")


def main(job_file: str) -> int:
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the launcher too, which then ends its workers
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING, force=True)
    logging.getLogger("traceforge_core").setLevel(logging.INFO)
    logging.captureWarnings(True)
    job = Job.read(Path(job_file))
    seat = _take_seat(job)
    try:
        seat.beat("starting")
        _train(job, seat)
    except StoppedByFile as error:
        seat.report(error)
        logger.info("%s", error)
        _exit(STOPPED_STATUS)
    except BaseException as error:
        seat.report(explain(error, job, seat.doing()) or error)
        if isinstance(error, TraceForgeError):
            logger.error("%s", error)
        else:
            logger.exception("The worker failed.")
        _exit(1)
    _exit(0)
    return 0


def _exit(status: int) -> None:
    """Leave at once: destructors of a half-finished exchange may wait for a peer that is gone."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_with_parent() -> None:
    """Never outlive the launcher, or torchrun's agent (which would otherwise leave its workers when it is killed)."""
    if (parent := os.environ.get("TRACEFORGE_PARENT")) is not None:
        end_with(int(parent))
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())


def _take_seat(job: Job) -> Seat:
    rank, scratch = _rank_and_scratch()
    return Seat(rank, scratch, ProgressFile(job.out_dir / FILE_NAME, "starting", "steps") if rank == 0 else None)


def _rank_and_scratch() -> tuple[int, Path | None]:
    if "TRACEFORGE_RANK" in os.environ:
        return int(os.environ["TRACEFORGE_RANK"]), Path(os.environ["TRACEFORGE_SCRATCH"])
    if "RANK" in os.environ:  # torchrun
        if local := os.environ.get("LOCAL_RANK"):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(local)] if visible else local
        given = os.environ.get("TRACEFORGE_SCRATCH")
        return int(os.environ["RANK"]), Path(given) if given else None
    return 0, None


def _train(job: Job, seat: Seat) -> None:
    if job.backend == "unsloth":
        import unsloth  # noqa: F401  (it must come before transformers and trl, which it patches)

    import transformers

    transformers.utils.logging.disable_progress_bar()
    # It sees a process group and warns that DDP is not used; it is not.
    logging.getLogger("transformers.training_args").setLevel(logging.ERROR)
    from traceforge_core.training.mesh import join_mesh

    if job.workers > 1:
        seat.beat("waiting for the other workers to start")
    mesh = join_mesh(job, seat.rank, seat.scratch if job.hosts == 1 else None)
    seat.beat("starting")
    module, _, name = job.trainer.partition(":")
    trainer_class = getattr(import_module(module), name)
    if job.kind in ("evaluate", "sample"):
        trainer_class(job, seat.beat)
        return
    if job.kind == "series":
        trainer_class(job, mesh, seat.beat)
        return
    way = import_module(f"traceforge_core.training.{'sft' if job.kind == 'sft' else 'preference'}")
    try:
        way.train(job, mesh, trainer_class, seat.beat)
    except StoppedByFile:
        finish_trackers(job, seat.rank)
        # Under torchrun the first to leave takes the others along: nobody does before rank 0 has saved everything.
        seat.beat("waiting for rank 0 to save a checkpoint")
        mesh.gather([0.0])
        raise
    finish_trackers(job, seat.rank)


if __name__ == "__main__":
    main(sys.argv[1])
