"""How much of the workers' output reaches the log. That the files hold all of it is tested with real workers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from traceforge_core.training.relay import Relay


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def relay(clock: Clock, caplog: pytest.LogCaptureFixture) -> Relay:
    caplog.set_level(logging.INFO, logger="traceforge_core")
    return Relay(Path("/runs/x/logs"), clock)


def test_a_long_training_shows_its_first_and_last_step_and_one_in_ten_seconds(
    relay: Relay, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(1, 1001):
        relay(0, f"step {step}/1000  loss 1.0")
        clock.now += 0.125
    told = [int(message.split()[2].partition("/")[0]) for message in caplog.messages]
    assert told[0] == 1 and told[-1] == 1000
    assert told == [1, *range(81, 1000, 80), 1000]


def test_a_fault_that_writes_without_end_is_cut_short_and_what_is_left_out_is_counted(
    relay: Relay, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(10_000):
        relay(1, f"warning {number}")
    relay(0, "the other worker is still heard")
    clock.now += 10.0
    relay(1, "later")
    assert len(caplog.messages) == 200 + 3
    assert caplog.messages[-3:] == [
        "[0] the other worker is still heard",
        "[1] ... 9800 lines left out here; /runs/x/logs/rank1.log has all",
        "[1] later",
    ]
