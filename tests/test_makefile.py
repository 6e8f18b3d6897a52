"""The Makefile's choice of Python, in a checkout whose path has a space. What it installs is tested by running it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """As much of a checkout as `make` looks at, below a folder with a space in its name."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    folder = tmp_path / "my projects" / "traceforge"
    folder.mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "requirements-dev.lock"):
        shutil.copy(REPOSITORY / name, folder)
    return folder


def make(checkout: Path, *targets: str, programs: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """`make` with nothing on PATH but these programs (name: shell script) and a few tools."""
    path = checkout.parent / "bin"
    path.mkdir()
    for tool in ("make", "sh", "rm", "touch", "sed", "mkdir"):
        (path / tool).symlink_to(str(shutil.which(tool)))
    for name, script in programs.items():
        (path / name).write_text(f"#!/bin/sh\n{script}\n")
        (path / name).chmod(0o755)
    return subprocess.run(["make", *targets], cwd=checkout, env={"PATH": str(path)}, capture_output=True, text=True)


def test_without_a_new_enough_python_it_says_what_to_install(checkout: Path) -> None:
    # A launcher that knows the name but has no such version, as pyenv's are, and a Python that is too old.
    done = make(checkout, "demo", programs={"python3.13": "echo not installed >&2; exit 127", "python3": "exit 1"})
    assert done.returncode != 0
    assert "TraceForge needs Python 3.11 or newer" in done.stderr and "apt-get install python3" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_launcher_without_its_python_is_passed_over(checkout: Path) -> None:
    good = f'case "$1" in -m) mkdir -p .venv/bin; touch .venv/bin/python;; *) exec "{sys.executable}" "$@";; esac'
    done = make(checkout, ".venv/bin/python", programs={"python3.13": "exit 127", "python3.12": good})
    assert done.returncode == 0, done.stderr
    assert "virtual environment in .venv with Python 3." in done.stdout
    assert (checkout / ".venv" / "bin" / "python").exists()


@pytest.mark.parametrize("status", [0, 3])
def test_an_installation_is_never_silent_for_long_and_its_failure_is_one(checkout: Path, status: int) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> "{checkout / "asked"}"\nsleep 3.5\nexit {status}\n')
    python.chmod(0o755)
    done = make(checkout, ".venv/.installed", "TICK=1", programs={"sleep": 'exec /bin/sleep "$@"'})
    assert "still installing (1 s)" in done.stdout and "still installing (2 s)" in done.stdout
    assert (done.returncode == 0) == (status == 0) == (checkout / ".venv" / ".installed").exists(), done.stderr
    assert "install --quiet --requirement requirements.lock" in (checkout / "asked").read_text()


def test_make_alone_lists_what_there_is(checkout: Path) -> None:
    told = make(checkout, programs={}).stdout
    assert all(f"make {target}" in told for target in ("demo", "test", "lint", "serve"))


def test_the_lock_pins_every_package_to_one_public_release() -> None:
    for name in ("requirements.lock", "requirements-dev.lock"):
        for line in (REPOSITORY / name).read_text().splitlines():
            if line and not line.startswith(("#", "-r ")):
                package, _, version = line.partition("==")
                assert package and version and "+" not in version and " " not in line, line
