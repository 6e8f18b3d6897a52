"""The scaling benchmark on the CPU with a tiny model: its figures, its table and plot, and what it says of no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, *arguments: str, **environment: str) -> tuple[str, list[dict[str, Any]]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "scaling.py"), *arguments]
    places = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(
        [*command, *places], check=True, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=280
    )
    lines = (tmp_path / "out" / "scaling.jsonl").read_text().splitlines()
    return done.stdout, [json.loads(line) for line in lines]


@pytest.mark.slow
def test_more_workers_are_measured_against_two_and_end_with_the_same_adapter(tmp_path: Path) -> None:
    arguments = ["--tiny", "--workers", "2,4", "--steps", "3", "--strategies", "branch_parallel"]
    printed, rows = run(tmp_path, *arguments)
    assert [row for row in rows if "cannot" in row] == []
    speed = {row["workers"]: row for row in rows if row["section"] == "speed"}
    assert set(speed) == {2, 4}
    for workers, row in speed.items():
        assert row["pairs_an_hour"] == pytest.approx(3600 * (workers // 2) / row["seconds_a_step"])
        assert 0 < row["communication_share"] < 1 and row["peak_gib"] > 0
    gained = speed[4]["pairs_an_hour"] / speed[2]["pairs_an_hour"] / 2
    assert f"| {gained:.4g} |" in next(line for line in printed.splitlines() if "| 64 | 4 |" in line)

    equal = {row["workers"]: row for row in rows if row["section"] == "equality"}
    assert set(equal) == {2, 4, "two workers again"}
    for row in equal.values():
        assert row["same_pairs"] and row["steps"] == 3
        assert row["adapter_difference"] <= 1e-5 and row["largest_loss_difference"] <= 1e-6
    assert (tmp_path / "out" / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "work").glob("scaling-*")) == []  # what was trained is gone again


def test_too_few_gpus_are_said_and_figures_of_other_machines_stay(tmp_path: Path) -> None:
    # The model is there already, so that nothing needs a GPU before jobs are made.
    model = tmp_path / "work" / "qwen3-8b"
    model.mkdir(parents=True)
    (model / "model.json").write_text("{}")
    known = {"section": "speed", "strategy": "shared_prefix", "length": 64, "workers": 2, "pairs_an_hour": 100.0}
    known |= {"communication_share": 0.1}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "scaling.jsonl").write_text(json.dumps(known) + "\n")
    printed, rows = run(tmp_path, "--lengths", "64", "--workers", "4", "--equal-length", "64", CUDA_VISIBLE_DEVICES="")
    assert rows[0] == known
    cannot = [row for row in rows if "no GPU can be used here" in row.get("cannot", "")]
    assert {(row["section"], row["strategy"]) for row in cannot} == {
        (section, strategy) for section in ("speed", "equality") for strategy in ("branch_parallel", "shared_prefix")
    }
    assert "| shared_prefix | 64 | 2 | 100 |" in printed


def test_odd_numbers_of_workers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        run(tmp_path, "--tiny", "--workers", "2,3")
    assert "even" in error.value.stderr
