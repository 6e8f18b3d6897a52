"""A temporary git checkout of a program, in which shell commands are run for real.

    with Workbench(case.program) as bench:
        observation = bench.run("python -m unittest")

What depends on the machine and not on the program (folders, times, addresses) is replaced in the output, so that the
same commands give the same text everywhere. `python` is the running interpreter without its site packages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

HOME = "/testbed"
TIMEOUT = 60.0
EPOCH = "2025-01-06T09:00:00+00:00"


@dataclass(frozen=True, slots=True)
class Observation:
    """What a command wrote (standard output and error together) and its exit status."""

    output: str
    returncode: int


class Workbench:
    """Context manager around one checkout; it is removed at the end."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def __enter__(self) -> Workbench:
        self._root = Path(tempfile.mkdtemp(prefix="traceforge-"))
        self.folder = self._root / "testbed"
        shutil.copytree(self._program, self.folder, ignore=shutil.ignore_patterns("__pycache__"))
        interpreter = self._root / "bin" / "python"
        interpreter.parent.mkdir()
        interpreter.write_text(f'#!/bin/sh\nexec "{_real_python()}" -s -S "$@"\n', encoding="utf-8")
        interpreter.chmod(0o755)
        self.run("git init -q -b main . && git add -A && git commit -q -m 'Import'")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    def run(self, command: str) -> Observation:
        """Run a command with bash in the checkout. Raises subprocess.TimeoutExpired after a minute."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT,
            check=False,
        )
        return Observation(self._without_machine(done.stdout), done.returncode)

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self._root / 'bin'}:{os.environ.get('PATH', os.defpath)}",
            "HOME": str(self._root),
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
            "PAGER": "cat",
            "NO_COLOR": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_AUTHOR_NAME": "Maintainer",
            "GIT_AUTHOR_EMAIL": "maintainer@example.org",
            "GIT_AUTHOR_DATE": EPOCH,
            "GIT_COMMITTER_NAME": "Maintainer",
            "GIT_COMMITTER_EMAIL": "maintainer@example.org",
            "GIT_COMMITTER_DATE": EPOCH,
        }

    def _without_machine(self, text: str) -> str:
        for folder, name in (
            (str(self.folder.resolve()), HOME),
            (str(self.folder), HOME),
            (_real_python(), "/usr/bin/python"),
            (sysconfig.get_path("stdlib"), "/usr/lib/python3"),
        ):
            text = text.replace(folder, name)
        text = re.sub(r"\b(Ran \d+ tests? in )\d+\.\d+s", r"\g<1>0.001s", text)
        return re.sub(r"\b0x[0-9a-f]{6,}\b", "0x7f0000000000", text)


def _real_python() -> str:
    return os.path.realpath(sys.executable)
