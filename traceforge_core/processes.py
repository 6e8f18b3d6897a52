"""Work shared out among processes of this machine, with the results in order.

    for summary in in_order(read_shard, jobs, workers=4, when_one_dies="... Set ingest.workers lower ..."):
        ...

A worker leaves Ctrl-C to its parent, and dies with it. Only as many jobs are handed out ahead of the results taken as
keep the workers busy, so what they leave behind stays small however long the list is.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

from traceforge_core.bound import end_with
from traceforge_core.errors import TraceForgeError

Job = TypeVar("Job")
Result = TypeVar("Result")
ShouldStop = Callable[[], bool]
AHEAD = 2
"""Jobs a worker that are begun, waiting or done before their results are taken."""


def in_order(
    do: Callable[[Job, ShouldStop], Result], jobs: Iterable[Job], workers: int, when_one_dies: str
) -> Generator[Result, None, None]:
    """The results of `do(job, should_stop)` in the order of the jobs, from that many processes.

    `do` is a function of a module (or a partial of one), and looks at `should_stop` often: it is true once nobody wants
    the result. Raises what `do` raises, and TraceForgeError with the text `when_one_dies` where a process ends in the
    middle of its work. Close it (contextlib.closing) where not all results are taken.
    """
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(stop, os.getpid())) as pool:
        try:
            left = iter(jobs)
            waiting: deque[Future[Result]] = deque(_submit(pool, do, job) for job in islice(left, AHEAD * workers))
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(_submit(pool, do, job) for job in islice(left, 1))
                yield result
        except BrokenProcessPool:
            raise TraceForgeError(when_one_dies) from None
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, do: Callable[[Job, ShouldStop], Result], job: Job) -> Future[Result]:
    try:
        return pool.submit(_do_in_worker, do, job)
    except OSError as error:  # no process could be started; or one died while the next was, and took the pool's pipes
        raise BrokenProcessPool(str(error)) from error


_stop: Any = None


def _start_worker(stop: Any, parent: int) -> None:
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        end_with(parent)


def _do_in_worker(do: Callable[[Job, ShouldStop], Result], job: Job) -> Result:
    return do(job, _stop.is_set)
