"""The commands that work on what a run has trained, and the doctor, as a person calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from traceforge_core.runs import Run

ROOT = Path(__file__).parents[3]


def call(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status, and the one JSON object on stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.slow
def test_doctor_answers_with_findings_and_a_preset(tmp_path: Path) -> None:
    status, answer = call("doctor", "--runs-dir", str(tmp_path))
    assert status == (1 if answer["problems"] else 0)
    assert answer["preset"] == "tiny-cpu"
    assert "gloo" in {finding["subject"] for finding in answer["findings"]}


@pytest.mark.slow
def test_eval_measures_every_adapter_of_the_run_or_those_named(trained_run: Run, tmp_path: Path) -> None:
    place = ("--runs-dir", str(trained_run.path.parent))
    status, answer = call("eval", "latest", *place, "--out", str(tmp_path / "report"))
    assert (status, list(answer["accuracy"])) == (0, ["base", "sft", "branch_parallel"])
    assert {"evaluation.json", "evaluation.md", "evaluation.png"} <= {
        path.name for path in (tmp_path / "report").iterdir()
    }
    sft = trained_run.stage_dir("sft") / "adapter"
    status, named = call("eval", "run", *place, "--adapter", f"mine={sft}", "--set", "evaluation.max_pairs=0")
    assert (status, list(named["action_loss"])) == (0, ["base", "mine"])
    assert named["action_loss"]["mine"] == answer["action_loss"]["sft"]
    assert named["accuracy"]["mine"] is None


@pytest.mark.slow
def test_predict_shows_base_and_tuned_models(trained_run: Run) -> None:
    arguments = ("predict", "run", "--runs-dir", str(trained_run.path.parent), "--sample", "2", "--tokens", "5")
    status, answer = call(*arguments)
    assert status == 0
    assert [list(one["actions"]) for one in answer["predictions"]] == [["base", "sft", "branch_parallel"]] * 2


@pytest.mark.slow
def test_export_writes_a_checked_model_and_leaves_other_folders_alone(trained_run: Run, tmp_path: Path) -> None:
    place = ("--runs-dir", str(trained_run.path.parent), "--out", str(tmp_path / "model"))
    status, answer = call("export", "run", *place, "--stage", "branch-parallel", "--dtype", "bfloat16")
    assert (status, answer["verdict"], answer["dtype"]) == (0, "pass", "bfloat16")
    assert (tmp_path / "model" / "model.safetensors").is_file()
    status, answer = call("export", "run", *place, "--dtype", "float16")
    assert (status, answer["error"]) == (1, "--dtype is 'float16'; it must be bfloat16 or float32.")
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    status, answer = call("export", "run", *place[:2], "--out", str(tmp_path))
    assert status == 1 and "left alone" in answer["error"]
