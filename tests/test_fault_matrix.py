"""Every stage under every fault: what failed is not there, what was finished is, the reason is kept, and the next call
goes on. (Faults of real trainings, bad input and cancellation by Prefect have tests of their own: docs/faults.md.)"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from traceforge_core import stages
from traceforge_core.config import RunConfig, load_config
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import Run
from traceforge_core.stages import STAGES, perform

Fault = Callable[[Path], None]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Fault]]:
    """Stages that take no time and write one file each. What a stage does on top is put into this dictionary."""
    faults: dict[str, Fault] = {}

    def stage_function(name: str) -> Callable[..., dict[str, Any]]:
        def work(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> dict[str, Any]:
            (out_dir / "half.txt").write_text(f"half of {name}", encoding="utf-8")
            if name in faults:
                faults[name](out_dir)
            (out_dir / "half.txt").rename(out_dir / "whole.txt")
            return {"verdict": "pass"}

        return work

    for name, stage in STAGES.items():
        fields = {field: getattr(stage, field) for field in stage.__slots__} | {"resumable": False}
        monkeypatch.setitem(STAGES, name, _Quick(**fields))
        _Quick.functions[name] = stage_function(name)
    monkeypatch.setattr(stages, "_outside", lambda name, config: {})
    monkeypatch.setattr(stages, "stage_bytes", lambda name, config, folders: 0)
    yield faults


class _Quick(stages.Stage):
    """A stage whose function is the test's."""

    functions: dict[str, Callable[..., dict[str, Any]]] = {}  # noqa: RUF012

    def load(self) -> Callable[..., dict[str, Any]]:
        return self.functions[self.name]


def up_to(run: Run, name: str) -> list[str]:
    """Perform every stage before this one. Returns their names."""
    before = list(STAGES)[: list(STAGES).index(name)]
    for each in before:
        perform(each, load_config(), run)
    return before


def new_run(folder: Path) -> Run:
    run = Run.create(folder)
    run.save_config({})
    return run


def assert_kept_out(run: Run, name: str, before: list[str]) -> None:
    assert run.result(name) is None and not run.stage_dir(name).exists(), "nothing that looks done"
    for each in before:
        result = run.result(each)
        assert result is not None and (result.path / "whole.txt").is_file(), "what was finished stays"


def assert_goes_on(run: Run, name: str, faults: dict[str, Fault], before: list[str]) -> None:
    faults.clear()
    assert all(perform(each, load_config(), run).reused for each in before)
    assert not perform(name, load_config(), run).reused
    assert sorted(path.name for path in run.stage_dir(name).iterdir()) == ["manifest.json", "whole.txt"]


def _raise(error: BaseException) -> Fault:
    def fault(_out_dir: Path) -> None:
        raise error

    return fault


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_that_fails_is_kept_out_with_its_reason(name: str, faulty: dict[str, Fault], tmp_path: Path) -> None:
    run = new_run(tmp_path)
    before = up_to(run, name)
    for error in (TraceForgeError("mend it like this"), ZeroDivisionError("nobody foresaw this")):
        faulty[name] = _raise(error)
        with pytest.raises(type(error), match=str(error)):
            perform(name, load_config(), run)
        assert run.failure(name) == str(error)
        assert_kept_out(run, name, before)
    assert_goes_on(run, name, faulty, before)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_that_is_interrupted_is_kept_out(name: str, faulty: dict[str, Fault], tmp_path: Path) -> None:
    run = new_run(tmp_path)
    before = up_to(run, name)
    faulty[name] = _raise(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        perform(name, load_config(), run)
    assert_kept_out(run, name, before)
    assert_goes_on(run, name, faulty, before)


@pytest.mark.parametrize("name", STAGES)
def test_a_disk_that_fills_up_in_a_stage_is_told_as_that(name: str, faulty: dict[str, Fault], tmp_path: Path) -> None:
    run = new_run(tmp_path)
    before = up_to(run, name)
    faulty[name] = _raise(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(TraceForgeError, match=f"disk is full: stage {name}"):
        perform(name, load_config(), run)
    assert_kept_out(run, name, before)
    assert_goes_on(run, name, faulty, before)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_for_which_there_is_no_room_does_not_begin(
    name: str, faulty: dict[str, Fault], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path)
    before = up_to(run, name)
    faulty[name] = _raise(AssertionError("it began"))
    with monkeypatch.context() as patch:
        patch.setattr(stages, "stage_bytes", lambda stage, config, folders: 1 << 60)
        with pytest.raises(TraceForgeError, match=f"Too little disk space: stage {name} needs about"):
            perform(name, load_config(), run)
    assert_kept_out(run, name, before)
    assert_goes_on(run, name, faulty, before)


@pytest.mark.parametrize("name", STAGES)
def test_a_process_that_is_killed_in_a_stage_leaves_a_run_that_goes_on(
    name: str, faulty: dict[str, Fault], tmp_path: Path
) -> None:
    run = new_run(tmp_path)
    before = up_to(run, name)
    faulty[name] = lambda out_dir: time.sleep(600)

    def work() -> None:
        with run.lock():
            perform(name, load_config(), run)

    victim = multiprocessing.get_context("fork").Process(target=work)
    victim.start()
    half = run.partial_dir(name) / "half.txt"
    deadline = time.monotonic() + 30
    while not half.is_file() or not half.read_text():
        assert time.monotonic() < deadline and victim.is_alive()
        time.sleep(0.005)
    with pytest.raises(TraceForgeError, match=f"process {victim.pid}"), run.lock():
        pass
    os.kill(victim.pid or 0, signal.SIGKILL)
    victim.join(timeout=10)
    assert victim.exitcode == -signal.SIGKILL
    assert_kept_out(run, name, before)
    with run.lock():  # nobody holds it any more
        assert_goes_on(run, name, faulty, before)


@pytest.mark.parametrize("name", [name for name, stage in STAGES.items() if stage.needs])
def test_a_stage_whose_input_is_torn_says_which_to_run(name: str, faulty: dict[str, Fault], tmp_path: Path) -> None:
    run = new_run(tmp_path)
    up_to(run, name)
    needed = STAGES[name].needs[0]
    (run.stage_dir(needed) / "whole.txt").unlink()
    with pytest.raises(TraceForgeError, match=f"Stage {name} needs the outputs of stage {needed}"):
        perform(name, load_config(), run)
