"""Work shared out among processes: order, how far it runs ahead, and how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from multiprocessing.context import SpawnProcess
from pathlib import Path

import psutil
import pytest

from tests.python_path import python_path
from traceforge_core.errors import TraceForgeError
from traceforge_core.processes.in_order import AHEAD, ShouldStop, in_order


def square(job: int, should_stop: ShouldStop) -> tuple[int, int]:
    time.sleep(0.05 * (job % 3))  # so that they do not end in the order in which they began
    return job * job, os.getpid()


def die_at_three(job: int, should_stop: ShouldStop) -> int:
    if job == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return job


def refuse_three(job: int, should_stop: ShouldStop) -> int:
    if job == 3:
        raise TraceForgeError("The third is refused.")
    return job


class Odd(Exception):
    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")  # pickled with one argument, so it cannot be made again from its pickle


def raise_what_cannot_be_sent(job: int, should_stop: ShouldStop) -> int:
    raise Odd("a hole", "the fence")


def work_until_stopped(folder: str, should_stop: ShouldStop) -> None:
    Path(folder, str(os.getpid())).touch()
    while not should_stop():
        time.sleep(0.02)


def pass_on(job: bytes, should_stop: ShouldStop) -> bytes:
    return job


def die_on_import(job: int, should_stop: ShouldStop) -> int:
    return job


if os.environ.get("TEST_DIE_ON_IMPORT_UNLESS", str(os.getpid())) != str(os.getpid()):
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_that_die_before_they_have_begun_are_an_error_with_the_callers_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_DIE_ON_IMPORT_UNLESS", str(os.getpid()))
    with (
        pytest.raises(TraceForgeError, match=r"^Set fewer\.$"),
        closing(in_order(die_on_import, range(9), 2, "Set fewer.")) as found,
    ):
        list(found)


def test_where_no_process_can_be_started_the_callers_advice_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: SpawnProcess) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(SpawnProcess, "start", refuse)
    with (
        pytest.raises(TraceForgeError, match=r"^Set fewer\.$"),
        closing(in_order(square, range(9), 2, "Set fewer.")) as found,
    ):
        list(found)


def test_large_jobs_and_large_results_cross_each_other() -> None:
    jobs = [bytes([number]) * (8 << 20) for number in range(6)]  # far more than a pipe holds, both ways at once
    with closing(in_order(pass_on, jobs, 2, "")) as results:
        assert list(results) == jobs


def test_results_come_in_order_from_other_processes_and_jobs_are_not_handed_out_far_ahead() -> None:
    handed_out = 0

    def jobs() -> object:
        nonlocal handed_out
        for number in range(40):
            handed_out += 1
            yield number

    with closing(in_order(square, jobs(), 2, "")) as results:  # type: ignore[arg-type]
        taken = []
        for result in results:
            taken.append(result)
            assert handed_out <= len(taken) + 2 * AHEAD
    assert [value for value, _ in taken] == [number * number for number in range(40)]
    assert len({process for _, process in taken} - {os.getpid()}) == 2


def test_a_process_that_dies_is_an_error_with_the_callers_advice_and_one_raised_by_a_job_comes_through() -> None:
    with (
        pytest.raises(TraceForgeError, match=r"^Take fewer\.$"),
        closing(in_order(die_at_three, range(9), 2, "Take fewer.")) as r,
    ):
        list(r)
    with (
        pytest.raises(TraceForgeError, match="third is refused"),
        closing(in_order(refuse_three, range(9), 2, "")) as r,
    ):
        list(r)


def test_an_error_that_cannot_be_sent_is_told_in_words() -> None:
    with pytest.raises(RuntimeError, match="Odd: a hole in the fence"):
        list(in_order(raise_what_cannot_be_sent, range(9), 2, ""))


def test_whoever_takes_only_the_first_result_waits_for_no_more(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with closing(in_order(square, range(10_000), 2, "")) as results:
        assert next(results)[0] == 0
    left = [
        child
        for child in set(psutil.Process().children()) - before
        if "resource_tracker" not in " ".join(child.cmdline())
    ]
    assert left == []


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the workers of a killed parent on Linux only")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_is_left_behind(how: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from test_in_order import in_order, work_until_stopped\n"
        "if __name__ == '__main__':\n"
        f"    list(in_order(work_until_stopped, [{str(tmp_path)!r}] * 9, 2, ''))\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": python_path(Path(__file__).parent)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    workers: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    while len(workers) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        workers = [psutil.Process(int(path.name)) for path in tmp_path.iterdir() if path.name.isdigit()]
    if how is signal.SIGINT:
        os.killpg(parent.pid, how)  # as Ctrl-C does: all of them get it
    else:
        parent.kill()
    _, told = parent.communicate(timeout=60)
    assert len(workers) == 2 and parent.returncode != 0
    gone, alive = psutil.wait_procs(workers, timeout=20)
    assert len(gone) == 2 and not alive
    if how is signal.SIGINT:
        assert b"KeyboardInterrupt" in told and b"SpawnProcess" not in told


def test_ctrl_c_while_workers_start_is_left_to_their_parent() -> None:
    """It goes to every process of a terminal, and found them in the middle of their imports."""
    done, interrupted = threading.Event(), set()

    def interrupt() -> None:
        while not done.is_set():
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    if any("spawn_main" in word for word in child.cmdline()):
                        child.send_signal(signal.SIGINT)
                        interrupted.add(child.pid)
            time.sleep(0.005)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with closing(in_order(square, range(4), 2, "died")) as results:
            assert [result for result, _ in results] == [0, 1, 4, 9]
    finally:
        done.set()
        thread.join()
    assert len(interrupted) == 2
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
