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
    done = call_aloud(*arguments)
    return done.returncode, json.loads(done.stdout)


def call_aloud(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.cli", *arguments, "--json"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def empty_oracle(run: Run) -> str:
    """Leave of the stage oracle no more than an empty adapter folder; returns what has to be said of it."""
    (run.stage_dir("oracle") / "adapter").mkdir(parents=True)
    return f"{run.stage_dir('oracle') / 'manifest.json'} cannot be read (No such file or directory)"


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
    place, damage = ("--runs-dir", str(trained_run.path.parent)), empty_oracle(trained_run)
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
    assert answer["left_out"] == {"oracle": damage} and named["left_out"] == {}


@pytest.mark.slow
def test_predict_shows_base_and_tuned_models_and_tells_of_a_damaged_one(trained_run: Run) -> None:
    damage = empty_oracle(trained_run)
    arguments = ("predict", "run", "--runs-dir", str(trained_run.path.parent), "--sample", "2", "--tokens", "5")
    done = call_aloud(*arguments)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["left_out"]) == (0, {"oracle": damage})
    assert f"Stage oracle of run run is left out, it is damaged: {damage}. Train it again with" in done.stderr
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
