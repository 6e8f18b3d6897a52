"""Work shared out among processes of this machine, with the results in order.

    for summary in in_order(read_shard, jobs, workers=4, when_one_dies="... Set ingest.workers lower ..."):
        ...

A worker leaves Ctrl-C to its parent, and dies with it. Only as many jobs are handed out ahead of the results taken as
keep the workers busy, so what they leave behind stays small however long the list is.

Each worker has a pipe of its own and shares no lock with anybody. The locks of concurrent.futures' pool die with a
worker that is killed while it holds one; and a worker that dies while the pool still starts others leaves it waiting
for those without end (seen on Python 3.11.7).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

from traceforge_core.errors import TraceForgeError
from traceforge_core.processes.bound import end_with

Job = TypeVar("Job")
Result = TypeVar("Result")
ShouldStop = Callable[[], bool]
AHEAD = 2
"""Jobs a worker that are begun, waiting or done before their results are taken."""
GRACE = 20.0
"""Seconds a worker has to end its job after nobody wants the result; then it is killed."""


def in_order(
    do: Callable[[Job, ShouldStop], Result], jobs: Iterable[Job], workers: int, when_one_dies: str
) -> Generator[Result, None, None]:
    """The results of `do(job, should_stop)` in the order of the jobs, from at most that many processes.

    `do` is a function of a module (or a partial of one), and looks at `should_stop` often: it is true once nobody wants
    the result. Raises what `do` raises, and TraceForgeError with the text `when_one_dies` where a process ends in the
    middle of its work or none can be started. Close it (contextlib.closing) where not all results are taken.
    """
    left = enumerate(jobs)
    crew: list[_Worker] = []
    done: dict[int, Result] = {}
    taken = 0
    try:
        _hand_out(left, crew, workers, do, AHEAD * workers)
        while any(worker.at_work for worker in crew) or done:
            while taken not in done:
                busy = {worker.pipe: worker for worker in crew if worker.at_work}
                for pipe in wait(list(busy)):
                    number, result = busy[pipe].answer()  # type: ignore[index]
                    done[number] = result
            result = done.pop(taken)
            taken += 1
            in_hand = sum(len(worker.at_work) for worker in crew) + len(done)
            _hand_out(left, crew, workers, do, AHEAD * workers - in_hand)
            yield result
    except _Died:
        raise TraceForgeError(when_one_dies) from None
    finally:
        for worker in crew:
            worker.pipe.close()
        for worker in crew:
            worker.end()


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """A process that is started here never hears Ctrl-C, which goes to all of a terminal's: before it can ignore it, it
    would die of it with a traceback in the middle of its imports. Whoever starts it hears it when the start is over."""
    resource_tracker.ensure_running()  # which lets signals in again when it starts its own process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Died(Exception):
    """A worker ended before its work, or could not be started."""


class _Worker:
    """One process, its pipe, and the numbers of the jobs it has been given and not answered."""

    def __init__(self, do: Callable[[Any, ShouldStop], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.at_work: deque[int] = deque()
        try:
            self.pipe, theirs = context.Pipe()
            with theirs:  # its end is open in the worker alone, so that the worker's death is seen as the end of file
                self.process: SpawnProcess = context.Process(target=_work, args=(do, theirs, os.getpid()), daemon=True)
                with _deaf_to_ctrl_c():
                    self.process.start()
        except OSError as error:
            raise _Died from error

    def give(self, number: int, job: object) -> None:
        try:
            self.pipe.send(job)
        except OSError as error:
            raise _Died from error
        self.at_work.append(number)

    def answer(self) -> tuple[int, Any]:
        try:
            result, error = self.pipe.recv()
        except (EOFError, OSError) as gone:
            raise _Died from gone
        if error is not None:
            raise error
        return self.at_work.popleft(), result

    def end(self) -> None:
        self.process.join(GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


def _hand_out(
    left: Iterator[tuple[int, Job]],
    crew: list[_Worker],
    workers: int,
    do: Callable[[Job, ShouldStop], Any],
    most: int,
) -> None:
    """Give at most that many further jobs, each to the one with least to do; start a worker while there are too few."""
    for _ in range(most):
        following = next(left, None)
        if following is None:
            return
        idle = next((worker for worker in crew if not worker.at_work), None)
        if idle is None and len(crew) < workers:
            crew.append(idle := _Worker(do))
        worker = idle or min(crew, key=lambda worker: len(worker.at_work))
        worker.give(*following)


def _work(do: Callable[[Any, ShouldStop], Any], pipe: Connection, parent: int) -> None:
    """The worker: answers each job with (result, None) or (None, error), until its parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        end_with(parent)
    jobs: queue.SimpleQueue[tuple[Any] | None] = queue.SimpleQueue()
    stop = threading.Event()

    def listen() -> None:  # a thread, so that a parent that sends a job never waits for one that sends a result
        try:
            while True:
                jobs.put((pipe.recv(),))
        except (EOFError, OSError):
            stop.set()
            jobs.put(None)

    threading.Thread(target=listen, daemon=True).start()
    while (given := jobs.get()) is not None and not stop.is_set():
        result, failed = None, None
        try:
            result = do(given[0], stop.is_set)
        except Exception as error:
            failed = _sendable(error)
        try:
            pipe.send((result, failed))
        except OSError:  # nobody reads any more
            return


def _sendable(error: Exception) -> Exception:
    """The error with a note of where it was raised, or its words where it does not outlive pickling."""
    told = "".join(traceback.format_exception(error))
    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))  # as the pipe does
    except Exception:
        return RuntimeError(told)
    error.add_note(f"In a process of its own:\n{told}")
    return error
