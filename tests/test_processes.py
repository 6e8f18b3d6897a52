"""Work shared out among processes: order, how far it runs ahead, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from traceforge_core.errors import TraceForgeError
from traceforge_core.processes import AHEAD, ShouldStop, in_order


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


def work_until_stopped(folder: str, should_stop: ShouldStop) -> None:
    Path(folder, str(os.getpid())).touch()
    while not should_stop():
        time.sleep(0.02)


def test_a_pool_that_breaks_while_a_process_is_being_started_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    start = ProcessPoolExecutor._spawn_process  # type: ignore[attr-defined]

    def start_one_and_then_none(pool: ProcessPoolExecutor) -> None:
        if pool._processes:
            raise OSError("handle is closed")  # as when the first has died in the meantime
        start(pool)

    monkeypatch.setattr(ProcessPoolExecutor, "_spawn_process", start_one_and_then_none)
    with (
        pytest.raises(TraceForgeError, match="Set fewer"),
        closing(in_order(square, range(9), 2, "Set fewer.")) as found,
    ):
        list(found)


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
        "from test_processes import in_order, work_until_stopped\n"
        "if __name__ == '__main__':\n"
        f"    list(in_order(work_until_stopped, [{str(tmp_path)!r}] * 9, 2, ''))\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": paths},
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
