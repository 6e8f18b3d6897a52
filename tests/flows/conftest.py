"""Stages that take no time, and the command line as a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.python_path import python_path
from traceforge_core import stages

REPOSITORY = Path(__file__).parents[2]
FAKES = Path(__file__).with_name("fakes.py")
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def fake_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage replaced by one that only writes a line, in this process."""
    spec = importlib.util.spec_from_file_location("fakes_for_this_process", FAKES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    for name, stage in module.install().items():
        monkeypatch.setitem(stages.STAGES, name, stage)
    monkeypatch.setattr(stages, "_outside", lambda name, config: {})


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for all commands of the session: making one takes some seconds."""
    return tmp_path_factory.mktemp("prefect home")


def environment(prefect_home: Path, **more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "FAKE_"))}
    env |= {"PREFECT_HOME": str(prefect_home), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return env | {"PYTHONPATH": python_path(REPOSITORY)} | more


@pytest.fixture
def command(prefect_home: Path, tmp_path: Path) -> Command:
    """Run `traceforge` as a user would, in an empty folder. `fakes=True`: with stages that take no time."""

    def run(*arguments: str, fakes: bool = False, **env: str) -> subprocess.CompletedProcess[str]:
        program = [str(FAKES)] if fakes else ["-m", "flows.cli"]
        return subprocess.run(
            [sys.executable, *program, *arguments],
            cwd=tmp_path,
            env=environment(prefect_home, **env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run
