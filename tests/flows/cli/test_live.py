"""What a command shows of its work: a bar at a terminal, lines elsewhere. Each time in a process of its own."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from tests.python_path import python_path

REPOSITORY = Path(__file__).parents[3]
PROGRAM = """
import logging, sys, time
from pathlib import Path
from flows.cli import live
from flows.cli.endings import log_on_stderr
from flows.session import Session
from traceforge_core.runs.progress import progress
from traceforge_core.runs import Run

live.POLL_SECONDS, live.FIRST_LINE_SECONDS, live.LINE_SECONDS = 0.05, 0.2, 0.5
run = Run.create(Path(sys.argv[1]))
log = logging.getLogger("traceforge_core.training.relay")
with log_on_stderr(), live.at_work("starting", bars="--json" not in sys.argv) as view:
    time.sleep(0.6)
    view.follow(run)
    session = Session(run, ["datasets"])
    session.note("datasets", "running")
    run.partial_dir("datasets").mkdir(parents=True)
    with progress(run.partial_dir("datasets"), "making pairs", "cases", total=30) as told:
        for number in range(30):
            told.add(1, pairs=2)
            told.write()
            time.sleep(0.05)
            if number == 15:
                log.info("[0] step 15/30  loss 1.0")
                log.info("a line that people want to see")
    session.note("datasets", "completed")
print("the answer")
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": python_path(REPOSITORY), "COLUMNS": "110", "TERM": "xterm-256color"}


def test_without_a_terminal_lines_come_now_and_then(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout == "the answer\n"
    lines = done.stderr.splitlines()
    told = [line for line in lines if "datasets: making pairs: " in line]
    assert any("starting: at work" in line for line in lines)
    assert 2 <= len(told) <= 5, "now and then: not thirty times"
    assert re.search(r"\d\d:\d\d:\d\d  datasets: making pairs: \d+ of 30 cases, \d+ pairs", told[0])
    assert "a line that people want to see" in done.stderr and "step 15/30" not in done.stderr
    assert "\x1b" not in done.stderr


def test_a_terminal_has_a_bar_that_moves_below_the_lines(tmp_path: Path) -> None:
    shown = at_a_terminal([sys.executable, "-c", PROGRAM, str(tmp_path)])
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "starting ━" in plain
    percents = [int(number) for number in re.findall(r"making pairs: (\d+) of 30 cases", plain)]
    assert percents == sorted(percents) and len(set(percents)) > 3
    assert re.search(r"datasets ━+ making pairs: \d+ of 30 cases, \d+ pairs", plain)
    assert "a line that people want to see\r\n" in plain and "step 15/30" not in plain
    assert shown.rstrip().endswith("the answer"), "the bar is gone at the end"
    with_json = at_a_terminal([sys.executable, "-c", PROGRAM, str(tmp_path), "--json"])
    assert "━" not in with_json and "datasets: making pairs" in with_json


def at_a_terminal(command: list[str]) -> str:
    """Everything that a command writes to the terminal it runs at."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, env=environment(), stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                more = os.read(ours, 65536)
            except OSError:  # what Linux says when the last writer has closed a terminal
                break
            shown += more
        assert process.wait(timeout=60) == 0, shown.decode()
    os.close(ours)
    return shown.decode()
