"""Which lines of the workers' output reach the log: as many as a person can read, and a database can hold.

A training of days writes a line a step, a fault may write thousands in a second; the log goes to Prefect's server,
which keeps every line. So of the lines that tell a step the first, the last and one every 10 seconds pass, of all
others bursts of 200 and then 2 a second. What does not pass is counted, and lies in the worker's own log file like all
the rest.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

STEP_LINE = re.compile(r"step (\d+)/(\d+) ")
STEP_SECONDS = 10.0
BURST = 200
LINES_A_SECOND = 2.0


class Relay:
    """Called with each line, (rank, line), from a thread a worker. Step lines come from one worker only."""

    def __init__(self, logs: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """`logs`: the folder that has every line, named where lines are left out."""
        self._logs = logs
        self._clock = clock
        self._next_step = 0.0
        self._allowed: dict[int, float] = {}
        self._filled: dict[int, float] = {}
        self._left_out: dict[int, int] = {}

    def __call__(self, rank: int, line: str) -> None:
        now = self._clock()
        if step := STEP_LINE.match(line):
            if step[1] not in ("1", step[2]) and now < self._next_step:
                return
            self._next_step = now + STEP_SECONDS
            logger.info("[%d] %s", rank, line)
            return
        since = now - self._filled.get(rank, now)
        self._filled[rank] = now
        allowed = min(BURST, self._allowed.get(rank, BURST) + since * LINES_A_SECOND)
        if allowed < 1:
            self._allowed[rank] = allowed
            self._left_out[rank] = self._left_out.get(rank, 0) + 1
            return
        if left_out := self._left_out.pop(rank, 0):
            logger.info("[%d] ... %d lines left out here; %s has all", rank, left_out, self._logs / f"rank{rank}.log")
        self._allowed[rank] = allowed - 1
        logger.info("[%d] %s", rank, line)
