"""The command line over the real stages, with real training processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.python_path import python_path
from traceforge_core.runs import Run

REPOSITORY = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert process.poll() is None and time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def ours(home: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            of_ours = process.environ().get("PREFECT_HOME") == str(home)
            if of_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def steps_taken(runs_dir: Path) -> int:
    """Lines in the step log of the SFT that is at work, or was interrupted."""
    return sum(log.read_text().count("\n") for log in runs_dir.glob("*/.partial/sft/metrics.jsonl"))


def test_ctrl_c_and_a_stop_file_in_the_middle_of_training_leave_no_process_and_the_next_call_goes_on(
    tmp_path: Path, prefect_home: Path
) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {"PREFECT_HOME": str(prefect_home), "PYTHONPATH": python_path(REPOSITORY)}
    command = [sys.executable, "-m", "flows.cli", "run", "--json", "--runs-dir", str(tmp_path), "--stages"]
    small = ["--set", "sft.max_steps=25", "--set", "sft.checkpoint_steps=5"]
    with subprocess.Popen(
        [*command, "ingest,model,datasets,sft", *small],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        wait_for(lambda: steps_taken(tmp_path) >= 7, process)  # the checkpoint of step 5 is whole by then
        assert any("traceforge_core.training.worker" in each.cmdline() for each in ours(prefect_home))
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert ours(prefect_home) == []
    assert "Traceback" not in err and "Stopped by SIGINT" in json.loads(out)["error"]
    run = Run.open(tmp_path)
    assert run.result("sft") is None and run.result("datasets") is not None
    assert (run.path / "monitoring" / "host_monitor.csv").read_bytes().endswith(b"\n")

    before = steps_taken(tmp_path)
    assert 7 <= before < 25
    with subprocess.Popen(
        [*command, "sft", "--run", run.run_id, "--set", "sft.max_steps=25"],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for(lambda: steps_taken(tmp_path) > before, process)
        stop = [sys.executable, "-m", "flows.cli", "stop", "--runs-dir", str(tmp_path)]
        asked = subprocess.run(stop, env=env, capture_output=True, text=True, timeout=60)
        assert asked.returncode == 0 and run.stop_file.is_file(), asked.stderr
        out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and ours(prefect_home) == []
    told = json.loads(out)
    assert "sft: stopped after step" in told["error"] and f"traceforge run --run {run.run_id}" in told["error"]
    assert next(each for each in told["stages"] if each["stage"] == "sft")["status"] == "interrupted"
    [checkpoint] = run.path.glob(".partial/sft/checkpoints/checkpoint-*")
    assert checkpoint.name == f"checkpoint-{steps_taken(tmp_path)}", "one of its last step"
    again = subprocess.run(stop, env=env, capture_output=True, text=True, timeout=60)
    assert again.returncode == 1 and "Nobody works on run" in again.stderr

    went_on = subprocess.run(
        [*command, "sft", "--run", run.run_id, "--set", "sft.max_steps=25"],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert went_on.returncode == 0, went_on.stderr
    stage = next(each for each in json.loads(went_on.stdout)["stages"] if each["stage"] == "sft")
    assert stage["status"] == "completed" and stage["figures"]["steps"] == 25
    assert f"Going on from the checkpoint of step {checkpoint.name.partition('-')[2]}." in went_on.stderr
    assert not run.stop_file.exists(), "who starts the run again wants it to go on"


def test_a_model_path_that_does_not_exist_is_named(tmp_path: Path, prefect_home: Path) -> None:
    env = os.environ | {"PREFECT_HOME": str(prefect_home), "PYTHONPATH": python_path(REPOSITORY)}
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "flows.cli",
            "run",
            "--json",
            "--runs-dir",
            str(tmp_path),
            "--set",
            "model.name=./nowhere",
        ],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    error = json.loads(ran.stdout)["error"]
    assert "nowhere" in error and "model.name" in error


def test_an_empty_folder_is_named(tmp_path: Path, prefect_home: Path) -> None:
    env = os.environ | {"PREFECT_HOME": str(prefect_home), "PYTHONPATH": python_path(REPOSITORY)}
    (tmp_path / "empty").mkdir()
    arguments = ["run", "--json", "--runs-dir", str(tmp_path / "runs"), "--set", f"ingest.path={tmp_path / 'empty'}"]
    ran = subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    assert str(tmp_path / "empty") in json.loads(ran.stdout)["error"]


def test_ingest_counts_what_is_there_and_replaces_only_its_own_output(tmp_path: Path, prefect_home: Path) -> None:
    def ingest(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "flows.cli", "ingest", *arguments, "--json"],
            env=os.environ | {"PYTHONPATH": python_path(REPOSITORY)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    out = tmp_path / "corpus"
    for _ in range(2):
        done = ingest("samples", "--out", str(out))
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["found"] == answer["read"] + answer["quarantined"] + answer["duplicates"] > 0
        assert sum(answer["by_format"].values()) == sum(answer["by_outcome"].values()) == answer["read"]
    assert json.loads((out / "report.json").read_text())["found"] == answer["found"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus"]

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    refused = ingest("samples", "--out", str(tmp_path / "mine"))
    assert refused.returncode == 1 and "left alone" in json.loads(refused.stdout)["error"]
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
