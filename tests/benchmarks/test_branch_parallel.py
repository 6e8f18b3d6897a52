"""The Branch-Parallel benchmark on the CPU with a tiny model: every section runs and says what it found, or why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "branch_parallel.py"), "--model", "tiny", *arguments]
    places = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"} | environment
    subprocess.run([*command, *places], check=True, env=environment, cwd=tmp_path, timeout=280)
    return [json.loads(line) for line in (tmp_path / "out" / "branch_parallel.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_section_runs_on_the_cpu(tmp_path: Path) -> None:
    rows = run(tmp_path, "--device", "cpu", "--lengths", "64", "--steps", "3", "--sections", "parity32,speed,cap")
    assert [row for row in rows if "cannot" in row] == []
    named = {(row["section"], row["name"]): row for row in rows}
    assert named["parity32", "branch_parallel"]["max_loss_difference"] <= 1e-6
    assert named["parity32", "branch_parallel"]["max_gradient_difference"] <= 1e-5
    for name in (
        "oracle (TRL)",
        "one worker, both branches in turn, transformers",
        "branch_parallel, transformers, gloo",
    ):
        assert named["speed", name]["seconds"] > 0
    assert 0 < named["speed", "branch_parallel, transformers, gloo"]["exchange_share"] < 1
    assert "| branch_parallel | 64 |" in (tmp_path / "out" / "branch_parallel.md").read_text()


def test_what_a_machine_cannot_run_is_said_and_skipped(tmp_path: Path) -> None:
    # The model is there already, so that nothing needs a GPU before jobs are made.
    model = tmp_path / "work" / "tiny"
    model.mkdir(parents=True)
    (model / "model.json").write_text("{}")
    rows = run(
        tmp_path, "--lengths", "64", "--sections", "speed", "--backends", "transformers", CUDA_VISIBLE_DEVICES=""
    )
    assert len(rows) == 4
    assert all("no GPU can be used here" in row["cannot"] for row in rows)
