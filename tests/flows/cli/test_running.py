"""The command `traceforge`, each time as a real process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.session import FILE_NAME
from tests.python_path import python_path
from traceforge_core.config import load_config, validate_config
from traceforge_core.runs import Run

REPOSITORY = Path(__file__).parents[3]
FAKES = Path(__file__).parents[1] / "fakes.py"
Command = Callable[..., "subprocess.CompletedProcess[str]"]


def one_object(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What --json promises: stdout is one JSON object and nothing else."""
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


def stages_of(answer: dict[str, Any]) -> dict[str, str]:
    return {stage["stage"]: stage["status"] for stage in answer["stages"]}


def processes_with(prefect_home: Path) -> list[psutil.Process]:
    """Processes (of any command of these tests) that still run: they all carry this PREFECT_HOME."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            of_ours = process.environ().get("PREFECT_HOME") == str(prefect_home)
            if of_ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.contextmanager
def started(prefect_home: Path, cwd: Path, *arguments: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A command with fake stages in a process group of its own, as a shell would start it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "FAKE_"))}
    with subprocess.Popen(
        [sys.executable, str(FAKES), *arguments],
        cwd=cwd,
        env=clean | {"PREFECT_HOME": str(prefect_home), "PYTHONPATH": python_path(REPOSITORY)} | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_help_answers_in_under_a_second(command: Command) -> None:
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        result = command("--help")
        seconds.append(time.monotonic() - began)
        assert result.returncode == 0
    assert all(name in result.stdout for name in ("run", "ingest", "show", "config", "stages"))
    assert min(seconds) < 1.0


def test_the_list_of_commands_fits_a_narrow_terminal_with_nothing_cut_off(command: Command) -> None:
    lines = command("--help", COLUMNS="60").stdout.splitlines()
    listed = lines[lines.index("Commands:") + 1 :]
    assert len(listed) == 14 and all(len(line) <= 60 and line.endswith(".") for line in listed)
    assert not any(line.endswith("...") for line in listed)


def test_ctrl_c_while_the_command_is_still_being_loaded_shows_no_traceback(command: Command, tmp_path: Path) -> None:
    # As Python does at Ctrl-C. A real signal would be ignored where the tests themselves run in the background.
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")  # found first, being in the current folder
    stopped = command("doctor")
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (130, "", "")


def test_the_version_is_told(command: Command) -> None:
    assert command("--version").stdout == f"traceforge {version('traceforge-core')}\n"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ru", ["run", "runs"]),
        ("run --preset qwen3-8b-1x2", ["qwen3-8b-1x24gb"]),
        ("run --stages ingest,mo", ["ingest,model"]),
        ("show ", ["latest", "20260102-000000", "20260101-000000"]),
        ("show 20260101", ["20260101-000000"]),
    ],
)
def test_the_tab_key_offers_commands_presets_stages_and_runs(
    command: Command, tmp_path: Path, typed: str, offered: list[str]
) -> None:
    for name in ("20260101-000000", "20260102-000000"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").write_text("{}")
    position = len(typed.split()) + typed.endswith(" ")
    asked = {"_TRACEFORGE_COMPLETE": "complete_bash", "COMP_WORDS": f"traceforge {typed}", "COMP_CWORD": str(position)}
    assert command(**asked).stdout.split() == offered


def test_the_printed_configuration_can_be_given_back(command: Command, tmp_path: Path) -> None:
    printed = command("config", "--set", "sft.max_steps=77")
    (tmp_path / "mine.yaml").write_text(printed.stdout)
    again = one_object(command("config", "--preset", "qwen3-8b-24gb", "--config", "mine.yaml", "--json"))
    assert validate_config(again) == load_config(assignments=["sft.max_steps=77"])
    assert "# Optimizer steps; empty: as many as `epochs` needs." in printed.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "--set", "sft.epochs=-1"], "sft.epochs: Input should be greater than 0 (given: -1)"),
        (["run", "--set", "sft.epoch=1"], "sft.epoch: no such field. Fields there: epochs,"),
        (["run", "--set", "sft.report_to=[tensorbored]"], "should be 'tensorboard', 'wandb', 'trackio' or 'mlflow'"),
        (["run", "--preset", "huge"], "There is no preset 'huge'. Presets: qwen3-8b-1x24gb, qwen3-8b-1x80gb,"),
        (["run", "--config", "none.yaml"], "Cannot read the config file none.yaml: No such file or directory."),
        (["run", "--stages", "ingest,cook"], "No such stage: cook. Stages: ingest, model,"),
        (["run", "--stages", " ,"], "No stage is named. Stages: ingest, model,"),
        (["run", "--set", "model.name=./nowhere"], "There is no model at nowhere (model.name)."),
        (["run", "--set", "ingest.outcomes=[gone.json]"], "There is no file or folder gone.json (ingest.outcomes)."),
        (["run", "--set", "model.device=cuda"], "model.device is cuda, but no GPU can be used here"),
        (["run", "--preset", "qwen3-8b-24gb"], "model.quantization nf4 needs a CUDA GPU, and none can be used here"),
        (["run", "--set", "preference.transport=nccl"], "preference.transport is nccl, which needs a GPU of its own"),
        (["run", "--stages", "ingest,compare"], "Stage compare needs the outputs of stage oracle, which a new run"),
        (["run", "--runs-dir", "/proc/runs"], "Cannot write to the folder of runs /proc/runs: "),
        (["run", "--run", "yesterday"], "There are no runs in runs. Start one with `traceforge run`"),
        (["show"], "There are no runs in runs. Start one with `traceforge run`"),
        (["run", "--lr", "3"], "No such option"),
        (["ingest", "nowhere", "--out", "corpus"], "nowhere"),
    ],
)
def test_a_mistake_gets_one_message_and_leaves_nothing_behind(
    command: Command, tmp_path: Path, arguments: list[str], told: str
) -> None:
    plain, as_json = command(*arguments), command(*arguments, "--json")
    assert plain.returncode == as_json.returncode == 1
    assert told in plain.stderr and told in one_object(as_json)["error"]
    assert "Traceback" not in plain.stderr + as_json.stderr and plain.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_path_is_told_in_a_second_or_two_without_a_server(command: Command, tmp_path: Path) -> None:
    began = time.monotonic()
    given = "datasets.preference={miners: [given], given: pairs.jsonl}"
    ran = command("run", "--set", given, PREFECT_API_URL="http://127.0.0.1:9/api")
    assert "There is no file or folder pairs.jsonl (datasets.preference.given)" in ran.stderr
    assert time.monotonic() - began < 10, "what takes long is Prefect"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_help_as_json_is_one_object_too(command: Command, arguments: list[str]) -> None:
    assert "Usage: traceforge" in one_object(command(*arguments, "--json"))["help"]


def test_an_ingest_that_can_read_nothing_fails_and_says_why(command: Command, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "torn.json").write_text('{"messages": [')
    plain = command("ingest", "logs", "--out", "corpus")
    assert plain.returncode == 1 and plain.stdout == ""
    assert (
        "traceforge: Nothing could be read: 1 found, all set aside (invalid_json 1). The first: torn.json"
        in plain.stderr
    )
    answer = one_object(command("ingest", "logs", "--out", "corpus", "--json"))
    assert (answer["found"], answer["read"], answer["quarantined"]) == (1, 0, 1)
    assert answer["error"].startswith("Nothing could be read")
    assert (tmp_path / "corpus" / "quarantine.jsonl").is_file(), "what was set aside can be looked at"


def test_an_ingest_says_how_much_was_set_aside_for_which_reason_and_where_to_look(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "torn.json").write_text('{"messages": [')
    (tmp_path / "logs" / "pointer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    turns = [{"role": "user", "content": "Mend it."}, {"role": "assistant", "content": "Done."}]
    (tmp_path / "logs" / "good.json").write_text(json.dumps({"messages": turns}))
    told = command("ingest", "logs", "--out", "corpus").stdout
    assert "found 3, read 1, quarantined 2, by reason (git_lfs_pointer 1, invalid_json 1), duplicates 0" in told
    assert f"why: {Path('corpus', 'quarantine.jsonl')}" in told


def test_stages_are_listed_in_order(command: Command) -> None:
    listed = one_object(command("stages", "--json"))["stages"]
    assert [stage["stage"] for stage in listed][:3] == ["ingest", "model", "datasets"]
    assert listed[2]["needs"] == ["ingest", "model"]


@pytest.mark.slow
def test_a_run_answers_with_one_json_object_and_leaves_no_process(command: Command, prefect_home: Path) -> None:
    ran = command("run", "--json", fakes=True)
    answer = one_object(ran)
    assert ran.returncode == 0, ran.stderr
    assert "sft prints to stdout" in ran.stderr, "whatever a library prints goes to stderr"
    left_out = dict.fromkeys(("shared_prefix", "noise_floor", "planted_faults"), "not_run")
    assert stages_of(answer) == dict.fromkeys(stages_of(answer), "completed") | left_out
    assert (answer["sft_samples"], answer["pairs_by_miner"]) == (7, {"outcome": 3, "recovery": 1})
    assert answer["parity"]["verdict"] == "pass"
    assert Path(answer["stages"][0]["path"]).joinpath("output.txt").is_file()
    assert processes_with(prefect_home) == []
    assert one_object(command("show", "latest", "--json")) == answer
    with contextlib.closing(sqlite3.connect(prefect_home / "prefect.db")) as database:
        flow_run = json.loads((Path(answer["path"]) / FILE_NAME).read_text())["flow_run_id"]
        lines = [line for (line,) in database.execute("SELECT message FROM log WHERE flow_run_id = ?", (flow_run,))]
    assert {"a line from sft", "a line from compare"} <= set(lines), "the server had them before it was ended"
    assert any(line.startswith("Finished in state Completed") for line in lines)

    changed = ("--set", "preference.max_steps=2", "--stages", "sft,branch-parallel")
    again = command("run", "--run", "latest", *changed, fakes=True)
    assert again.returncode == 0, again.stderr
    heads = [line.split() for line in again.stdout.splitlines() if line.startswith("  ") and line[2] != " "]
    states = {words[0]: words[1] for words in heads}
    assert states["sft"] == "reused" and states["branch_parallel"] == "completed"
    assert states["compare"] == "outdated", "one of its inputs was made anew"
    assert "Parity with the oracle: PASS (outdated" in again.stdout
    assert "Traceback" not in again.stderr


@pytest.mark.slow
def test_a_run_without_parity_ends_with_its_summary_and_status_2(command: Command) -> None:
    ran = command("run", fakes=True, FAKE_COMPARE="disagree")
    assert ran.returncode == 2
    assert "Parity with the oracle: FAIL" in ran.stderr
    assert "does not agree with the oracle" in ran.stderr and "report.md" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.slow
def test_an_error_nobody_foresaw_is_one_line_and_its_traceback_lies_in_the_run(
    command: Command, tmp_path: Path
) -> None:
    ran = command("run", "--json", fakes=True, FAKE_SFT="crash")
    answer = one_object(ran)
    assert ran.returncode == 1
    assert answer["error"].startswith("Something unexpected went wrong: ZeroDivisionError: a fault nobody foresaw.")
    assert "Traceback" not in ran.stderr
    told = command("run", "--run", "latest", fakes=True, FAKE_SFT="fail").stderr
    assert told.count("The fake stage sft was asked to fail") == 1, "once, at the end"
    assert stages_of(answer)["sft"] == "failed" and stages_of(answer)["datasets"] == "completed"
    [run] = (tmp_path / "runs").iterdir()
    assert "ZeroDivisionError" in (run / "traceback.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_training_leaves_no_process_and_nothing_that_looks_done(
    prefect_home: Path, tmp_path: Path, command: Command, number: signal.Signals
) -> None:
    with started(prefect_home, tmp_path, "run", "--json", FAKE_SFT="hang") as process:
        wait_for(lambda: bool(list(tmp_path.glob("runs/*/.partial/sft/child.pid"))))
        os.killpg(process.pid, number)  # as a terminal does: the whole foreground group
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    answer = json.loads(out)
    assert answer["error"].startswith(f"Stopped by {number.name}. Go on with: traceforge run --run ")
    assert "Traceback" not in err
    wait_for(lambda: processes_with(prefect_home) == [], seconds=10)
    assert stages_of(answer)["sft"] == "interrupted" and stages_of(answer)["oracle"] == "not_run"
    run = Run.open(tmp_path / "runs")
    assert run.result("sft") is None and run.result("datasets") is not None
    went_on = one_object(command("run", "--run", run.run_id, "--json", fakes=True))
    assert went_on["stages"][2]["reused"] is True and stages_of(went_on)["sft"] == "completed"


@pytest.mark.slow
def test_killing_the_command_ends_its_server_and_the_run_shows_as_interrupted(
    prefect_home: Path, tmp_path: Path, command: Command
) -> None:
    with started(prefect_home, tmp_path, "run", FAKE_SFT="hang") as process:
        wait_for(lambda: bool(list(tmp_path.glob("runs/*/.partial/sft/child.pid"))))
        assert stages_of(one_object(command("show", "--json")))["sft"] == "running"
        process.kill()
        process.wait(timeout=10)
        child = int(next(tmp_path.glob("runs/*/.partial/sft/child.pid")).read_text())
        wait_for(lambda: {each.pid for each in processes_with(prefect_home)} <= {child}, seconds=10)
    assert stages_of(one_object(command("show", "--json")))["sft"] == "interrupted"


@pytest.mark.slow
def test_a_server_that_is_killed_stops_the_run_in_seconds_and_the_next_call_goes_on(
    prefect_home: Path, tmp_path: Path, command: Command
) -> None:
    with started(prefect_home, tmp_path, "run", "--json", FAKE_SFT="hang") as process:
        wait_for(lambda: bool(list(tmp_path.glob("runs/*/.partial/sft/child.pid"))))
        [server] = [each for each in psutil.Process(process.pid).children() if "flows.embedded" in each.cmdline()]
        server.kill()
        began = time.monotonic()
        out, err = process.communicate(timeout=60)  # a process left behind would keep stderr open
        assert time.monotonic() - began < 20, "what takes long is Prefect, which tries again for minutes"
    assert process.returncode == 1
    answer = json.loads(out)
    assert answer["error"].startswith("Prefect's embedded server was killed by SIGKILL")
    assert str(prefect_home / "server.log") in answer["error"]
    assert answer["error"].endswith(f"Go on with: traceforge run --run {answer['run_id']}")
    assert "Prefect's embedded server is gone." in err
    assert not any(noise in err for noise in ("Traceback", "ERROR", "Error logging"))
    wait_for(lambda: processes_with(prefect_home) == [], seconds=5)
    assert (stages_of(answer)["datasets"], stages_of(answer)["sft"]) == ("completed", "interrupted")
    went_on = one_object(command("run", "--run", answer["run_id"], "--stages", "datasets,sft", "--json", fakes=True))
    assert went_on["stages"][2]["reused"] is True and stages_of(went_on)["sft"] == "completed"


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_named(command: Command, tmp_path: Path) -> None:
    ran = command("run", "--json", fakes=True, PREFECT_API_URL="http://127.0.0.1:9/api")
    assert ran.returncode == 1
    assert "The Prefect API at http://127.0.0.1:9/api does not answer" in one_object(ran)["error"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_disk_that_fills_up_during_a_stage_is_one_clear_message(command: Command, small_disk: Path) -> None:
    ran = command("run", "--runs-dir", str(small_disk), "--json", fakes=True, FAKE_DATASETS="fill")
    assert ran.returncode == 1
    answer = one_object(ran)
    assert "The disk is full: stage datasets could not write to" in answer["error"]
    assert "Traceback" not in ran.stderr
    assert stages_of(answer)["model"] == "completed"
    assert stages_of(answer)["datasets"] in ("failed", "interrupted"), "there may be no space to write down why"
    run = Run.open(small_disk)
    assert run.result("datasets") is None and run.result("model") is not None
    assert json.loads((run.path / FILE_NAME).read_text())["asked_for"][0] == "ingest"


@pytest.mark.slow
def test_a_stage_that_will_not_fit_is_refused_before_it_begins_and_says_what_it_needs(
    command: Command, small_disk: Path
) -> None:
    (small_disk / "others").write_bytes(bytes(24 << 20))
    ran = command("run", "--runs-dir", str(small_disk), "--json", fakes=True)
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    error = one_object(ran)["error"]
    assert "Too little disk space: stage ingest needs about 16." in error and "traceforge runs" in error
    assert not list(small_disk.glob("*/.partial/ingest/output.txt")), "it did not begin"
    (small_disk / "others").unlink()
    run = Run.open(small_disk)
    assert command("run", "--runs-dir", str(small_disk), "--run", run.run_id, fakes=True).returncode == 0


@pytest.mark.slow
def test_a_full_disk_is_told_before_anything_is_made(command: Command, full_disk: Path) -> None:
    ran = command("run", "--runs-dir", str(full_disk), fakes=True)
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    assert f"The disk is full: cannot write to the folder of runs {full_disk}. Free some space" in ran.stderr
    assert "another place" not in ran.stderr and [each.name for each in full_disk.iterdir()] == ["fill"]
