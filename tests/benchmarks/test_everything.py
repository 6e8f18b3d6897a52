"""`make bench`: what it would run here, and that its commands are still those of the benchmarks."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.python_path import python_path

ROOT = Path(__file__).parents[2]


def test_without_a_gpu_it_runs_what_a_cpu_can_and_says_what_the_others_need() -> None:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / "everything.py"), "--list"]
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    answers = dict(re.findall(r"^python (benchmarks/.*)\n((?:Would|Not) run.*)$", told, re.MULTILINE))
    assert told.startswith("No GPUs here.") and len(answers) == told.count("\n## ")
    assert set(answers.values()) == {
        "Would run.",
        "Not run: it needs 1 GPU.",
        "Not run: it needs 2 GPUs.",
        "Not run: it needs a download first; its file says which.",
    }
    for line in answers:
        file, *words = shlex.split(line)
        text = (ROOT / file).read_text(encoding="utf-8")
        assert all(f'"{word}"' in text for word in words if word.startswith("--")), line
