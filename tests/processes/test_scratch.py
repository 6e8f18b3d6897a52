"""Scratch folders go away: with their block, and with the next one where their process was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.python_path import python_path
from traceforge_core.processes.scratch import LOCK, remove_left_behind, scratch_folder

REPOSITORY = Path(__file__).parents[2]
HOLD = """
import time
from traceforge_core.processes.scratch import scratch_folder
with scratch_folder("test") as folder:
    (folder / "large.bin").write_bytes(bytes(100))
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def an_hour_ago(folder: Path) -> None:
    then = folder.stat().st_mtime - 3600
    os.utime(folder, (then, then))


def test_a_folder_is_gone_after_its_block_also_where_it_fails(temporary: Path) -> None:
    with pytest.raises(ZeroDivisionError), scratch_folder("test") as folder:
        assert folder.parent == temporary and folder.name.startswith("traceforge-test-")
        (folder / "inner").mkdir()
        raise ZeroDivisionError
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next_and_not_before(temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": python_path(REPOSITORY)},
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        an_hour_ago(folder)
        assert remove_left_behind() == [], "its process lives"
        process.kill()
        process.wait()
    assert (folder / "large.bin").is_file()
    an_hour_ago(folder)
    with scratch_folder("next"):
        assert not folder.exists()


def test_a_folder_that_was_just_made_or_is_not_ours_stays(temporary: Path) -> None:
    young, strange = temporary / "traceforge-young", temporary / "traceforge-notes"
    for folder in (young, strange):
        folder.mkdir()
    (young / LOCK).touch()
    an_hour_ago(strange)
    assert remove_left_behind() == []
    assert young.is_dir() and strange.is_dir()
