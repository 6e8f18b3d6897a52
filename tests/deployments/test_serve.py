"""`make serve` for real: server, worker, deployments, runs from another shell, cancellation, Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient

from deployments import serve
from deployments.crashes import set_up_crash_detection
from tests.deployments.browser import CHROMIUM, Browser
from tests.deployments.serving import post, processes_of, serving, wait_for
from tests.ports import free_port
from tests.python_path import python_path

REPOSITORY = Path(__file__).parents[2]
SMALL = {
    "sft": {"max_steps": 2},
    "preference": {"max_steps": 5},
    "comparison": {"gradient_steps": 5},
    "evaluation": {"max_pairs": 2, "max_actions": 2},
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class Served:
    """A server and worker under test, with what another shell needs to talk to them."""

    process: subprocess.Popen[str]
    url: str
    env: dict[str, str]
    runs_dir: Path

    def prefect(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def post(self, path: str, **body: Any) -> Any:
        return post(f"{self.url}/{path}", body)

    def start(self, deployment: str, **parameters: Any) -> str:
        """Start a run with the ordinary command, as from another shell. Returns its id."""
        given = {"runs_dir": str(self.runs_dir)} | parameters
        before = {run["id"] for run in self.post("flow_runs/filter")}
        self.prefect("deployment", "run", f"traceforge/{deployment}", "--params", json.dumps(given))
        after = {run["id"] for run in self.post("flow_runs/filter") if not run["auto_scheduled"]}
        [new] = after - before
        return new

    def state(self, flow_run: str) -> str:
        return httpx.get(f"{self.url}/flow_runs/{flow_run}", timeout=30).json()["state_name"]

    def wait(self, flow_run: str, seconds: float = 300) -> str:
        done = ("Completed", "Failed", "Crashed", "Cancelled")
        wait_for(lambda: self.state(flow_run) in done, seconds)
        return self.state(flow_run)

    def log(self, flow_run: str) -> str:
        wanted = {"flow_run_id": {"any_": [flow_run]}}
        return "\n".join(line["message"] for line in self.post("logs/filter", logs=wanted))

    def artifacts(self, flow_run: str) -> dict[str, str]:
        found = self.post("artifacts/filter", artifacts={"flow_run_id": {"any_": [flow_run]}})
        return {each["key"]: each["data"] for each in found}

    def task_states(self, flow_run: str) -> dict[str, str]:
        found = self.post("task_runs/filter", flow_runs={"id": {"any_": [flow_run]}})
        return {each["name"]: each["state_name"] for each in found}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("prefect")
    with serving(home) as here:
        url = f"{here.url}/api"
        assert f"export PREFECT_API_URL={url}" in here.told
        yield Served(here.process, url, here.env | {"PREFECT_API_URL": url}, tmp_path_factory.mktemp("runs"))
        here.process.send_signal(signal.SIGINT)
        assert here.process.wait(timeout=60) == 0
        wait_for(lambda: processes_of(home) == [], seconds=20)


@pytest.fixture(scope="module")
def full(served: Served) -> str:
    """A full run that is completed: its flow run's id."""
    flow_run = served.start("full-pipeline", config=SMALL)
    assert served.wait(flow_run) == "Completed", served.log(flow_run)
    return flow_run


def test_a_full_run_and_then_one_stage_of_it_complete_with_their_artifacts(served: Served, full: str) -> None:
    shown = served.artifacts(full)
    assert set(shown) >= {
        "ingest-report",
        "datasets-report",
        "sft-report",
        "oracle-report",
        "compare-report",
        "monitoring",
    }
    assert "data:image/png;base64," in shown["compare-report"] and "data:image/png;base64," in shown["monitoring"]
    # Lines of the training processes reach the run's log, some time after they were written.
    wait_for(lambda: "step 2/2" in served.log(full), seconds=30)
    assert set(shown) >= {"sft-progress", "oracle-progress", "branch-parallel-progress"}
    assert float(shown["sft-progress"]) == 100
    [run] = [path for path in served.runs_dir.iterdir() if (path / "config.json").is_file()]
    assert json.loads((run / "compare" / "manifest.json").read_text())["figures"]["verdict"] == "pass"

    one = served.start("compare")
    assert served.wait(one) == "Completed", served.log(one)
    # States of tasks reach the server as events, some time after the run's own.
    wait_for(lambda: served.task_states(one) == {"compare": "Cached"}, seconds=30)  # latest, as it was: nothing to do
    again = served.start("compare", run=run.name, refresh=True)
    assert served.wait(again) == "Completed", served.log(again)
    wait_for(lambda: served.task_states(again) == {"compare": "Completed"}, seconds=30)
    assert len(list(served.runs_dir.iterdir())) == 1


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_person_looks_at_a_full_run_in_the_browser_and_does_one_stage_again_from_its_form(
    served: Served, full: str, tmp_path: Path
) -> None:
    ui = served.url.removesuffix("/api")
    [compare] = [each["id"] for each in served.post("deployments/filter") if each["name"] == "compare"]
    before = {run["id"] for run in served.post("flow_runs/filter")}
    with Browser(tmp_path) as browser:
        browser.open(f"{ui}/runs/flow-run/{full}")
        browser.click("Artifacts")
        browser.click("run-summary")
        browser.wait_for("Parity with the oracle: PASS")
        for report, pictures in (("compare-report", 3), ("evaluate-report", 1), ("sft-report", 1), ("monitoring", 1)):
            [artifact] = served.post(
                "artifacts/filter", artifacts={"flow_run_id": {"any_": [full]}, "key": {"any_": [report]}}
            )
            browser.open(f"{ui}/artifacts/artifact/{artifact['id']}")
            browser.wait_until(f"[...document.images].filter((i) => i.naturalWidth > 300).length >= {pictures}")
            links = "[...document.querySelectorAll('a')].map((link) => link.getAttribute('href') || '')"
            assert not [link for link in browser.script(links) if link.startswith("..")], "they would lead nowhere"

        browser.open(f"{ui}/deployments/deployment/{compare}/run")
        browser.wait_for("new, latest, or the id of the run to go on with.")
        field = "[...document.querySelectorAll('input, textarea')].find((field) => field.value === 'runs')"
        browser.type_over(field, str(served.runs_dir))
        browser.submit()
        after = {run["id"] for run in served.post("flow_runs/filter") if not run["auto_scheduled"]}
        [again] = after - before
        browser.open(f"{ui}/runs/flow-run/{again}")
        assert served.wait(again) == "Completed", served.log(again)
        browser.click("Task Runs")
        card = r"/\ncompare\n(.*\n){0,4}Cached\n/"  # name, tags, state
        browser.wait_until(f"{card}.test(document.body.innerText)")


def test_the_form_refuses_a_wrong_value_before_anything_runs(served: Served) -> None:
    wrong = {"config": {"sft": {"epochs": -1}}, "runs_dir": str(served.runs_dir)}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "prefect",
            "deployment",
            "run",
            "traceforge/full-pipeline",
            "--params",
            json.dumps(wrong),
        ],
        env=served.env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0 and "epochs" in done.stdout + done.stderr


def test_the_night_is_scheduled_and_the_limit_and_the_pool_are_there(served: Served) -> None:
    [night] = [d for d in served.post("deployments/filter") if d["name"] == "nightly-regression"]
    [schedule] = night["schedules"]
    assert schedule["active"] is True and schedule["schedule"]["cron"] == "30 4 * * *"
    assert httpx.get(f"{served.url}/work_pools/traceforge", timeout=30).json()["type"] == "process"
    assert httpx.get(f"{served.url}/v2/concurrency_limits/gpu", timeout=30).json()["limit"] >= 1


def test_cancelling_in_the_middle_of_training_leaves_no_worker_and_no_half_output(served: Served) -> None:
    def workers() -> list[psutil.Process]:
        home = Path(served.env["PREFECT_HOME"])
        return [p for p in processes_of(home) if "traceforge_core.training.worker" in p.cmdline()]

    long = SMALL | {"sft": {"max_steps": 100_000}}
    flow_run = served.start("full-pipeline", config=long, refresh=True)
    wait_for(lambda: bool(workers()), seconds=180)
    wait_for(lambda: "step 1/" in served.log(flow_run), seconds=120)
    served.prefect("flow-run", "cancel", flow_run)
    wait_for(lambda: not workers(), seconds=15)
    assert served.wait(flow_run, seconds=60) == "Cancelled"
    [run] = [path for path in served.runs_dir.iterdir() if flow_run in (path / "invocation.json").read_text()]
    assert not (run / "sft").exists() and (run / "datasets" / "manifest.json").is_file()
    assert (run / "monitoring" / "host_monitor.csv").read_bytes().endswith(b"\n")


def test_a_killed_flow_run_is_crashed_and_the_next_one_goes_on_from_its_checkpoint(served: Served) -> None:
    """First with its worker alive, then with a worker that is as good as dead, where only the heartbeats tell."""
    home = Path(served.env["PREFECT_HOME"])

    def trainers() -> list[psutil.Process]:
        return [p for p in processes_of(home) if "traceforge_core.training.worker" in p.cmdline()]

    def checkpoints() -> list[Path]:
        return [path for path in run.glob(".partial/sft/checkpoints/checkpoint-*") if path.name[11:].isdigit()]

    long = SMALL | {"sft": {"max_steps": 100_000, "checkpoint_steps": 2, "schedule": "constant"}}
    first = served.start("full-pipeline", config=long, stages=["ingest", "model", "datasets", "sft"])
    wait_for(lambda: bool(trainers()), seconds=180)
    [run] = [path for path in served.runs_dir.iterdir() if first in (path / "invocation.json").read_text()]
    wait_for(lambda: bool(checkpoints()), seconds=120)
    trainers()[0].parent().kill()  # type: ignore[union-attr]
    wait_for(lambda: served.state(first) == "Crashed", seconds=30)
    wait_for(lambda: not trainers(), seconds=5)

    with SyncPrefectClient(served.url) as client:
        set_up_crash_detection(client, silence=timedelta(seconds=45))
    reached = max(int(path.name[11:]) for path in checkpoints())
    second = served.start("sft", run=run.name)
    wait_for(lambda: f"Going on from the checkpoint of step {reached}." in served.log(second), seconds=120)
    [worker] = [p for p in processes_of(home) if p.cmdline()[2:5] == ["deployments.lean", "worker", "start"]]
    worker.suspend()  # it sees and says nothing any more, as on a machine that went down
    try:
        trainers()[0].parent().kill()  # type: ignore[union-attr]
        wait_for(lambda: not trainers(), seconds=5)
        assert served.state(second) == "Running"
        wait_for(lambda: served.state(second) == "Crashed", seconds=120)
    finally:
        worker.resume()


def test_a_server_and_a_worker_that_are_killed_are_started_again_while_their_run_goes_on(served: Served) -> None:
    home = Path(served.env["PREFECT_HOME"])

    def of_serve() -> dict[str, int]:
        """Server and worker by what they are, with their process ids."""
        found = [(p.cmdline(), p.pid) for p in processes_of(home)]
        return {line[3]: pid for line, pid in found if line[4:5] == ["start"] and line[3] in ("server", "worker")}

    def steps() -> int:
        return sum(log.read_text().count("\n") for log in served.runs_dir.glob("*/.partial/sft/metrics.jsonl"))

    # The run that the test above left behind; alone, one of its own.
    interrupted = [path.parents[2] for path in served.runs_dir.glob("*/.partial/sft/checkpoints")]
    if not interrupted:
        long = SMALL | {"sft": {"max_steps": 100_000, "checkpoint_steps": 2, "schedule": "constant"}}
        flow_run = served.start("full-pipeline", config=long, stages=["ingest", "model", "datasets", "sft"])
    else:
        run = max(interrupted, key=lambda path: (path / "invocation.json").stat().st_mtime)
        flow_run = served.start("sft", run=run.name)
    wait_for(lambda: "step 1" in served.log(flow_run) or "Going on from the checkpoint" in served.log(flow_run), 180)
    before = of_serve()
    assert set(before) == {"server", "worker"}
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(of_serve()) == 2 and not set(of_serve().values()) & set(before.values()), seconds=60)
    wait_for(lambda: httpx_answers(f"{served.url}/health"), seconds=90)
    reached = steps()
    wait_for(lambda: steps() > reached, seconds=60)
    assert served.state(flow_run) == "Running"

    [run] = [path for path in served.runs_dir.iterdir() if flow_run in (path / "invocation.json").read_text()]
    (run / "STOP").touch()
    assert served.wait(flow_run, seconds=90) == "Cancelled"
    # Lines reach the server some time after the run has ended.
    wait_for(lambda: "with a checkpoint, because" in served.log(flow_run), seconds=30)


def httpx_answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, timeout=30).status_code == 200
    return False


def test_a_port_that_is_taken_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "deployments.serve"],
            cwd=REPOSITORY,
            env=os.environ | {"PREFECT_SERVER_API_PORT": str(port), "PYTHONPATH": python_path(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1 and f"port {port} is taken" in done.stdout


KEEP = """
import os, signal, sys, time
from pathlib import Path
import psutil
from deployments import serve
from traceforge_core.processes.bound import adopt_orphans

def until(what):
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)

adopt_orphans()
# A worker and its run, which is in a session of its own.
work = "import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
with serve._Kept("worker", ["timeit", "-n1", "-r1", work], os.environ, Path(sys.argv[1])) as worker:
    first = psutil.Process(worker.process.pid)
    until(lambda: first.children())
    [run] = first.children()
    first.kill()
    until(lambda: worker.process.poll() is not None)
    try:
        worker.tend()
    except serve.TraceForgeError as error:
        print("at once:", error)
    worker._started -= serve.SHORT_LIFE_SECONDS
    worker.tend()
    assert worker.process.pid != first.pid and worker.process.poll() is None
    assert serve._orphans([worker]) == [run] and run.ppid() == os.getpid()
    serve._end([run])
    until(lambda: not serve._orphans([worker]))
    second = psutil.Process(worker.process.pid)
    until(lambda: second.children())
    left = second.children()
assert not any(each.is_running() and each.status() != "zombie" for each in [second, *left])
print("nothing left")
"""


def test_what_dies_is_started_again_its_runs_are_adopted_and_what_dies_at_once_is_given_up(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KEEP, str(tmp_path)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": python_path(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    at_once, again, end = done.stdout.splitlines()
    assert at_once == f"at once: The worker ended by itself. Its log: {tmp_path / 'worker.log'}"
    assert "The worker ended by itself, by signal 9, and is started again" in again and end == "nothing left"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("PREFECT_SERVER_API_PORT", "four", "PREFECT_SERVER_API_PORT is 'four': give a port number"),
        ("PREFECT_SERVER_API_PORT", "70000", "PREFECT_SERVER_API_PORT is '70000': give a port number"),
        ("PREFECT_HOME", "/proc/nowhere", "Cannot write to /proc/nowhere"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_line(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("PREFECT_SERVER_API_PORT", str(free_port()))
    monkeypatch.setenv(variable, value)
    assert serve.main() == 1
    assert said in capsys.readouterr().out


def test_two_do_not_serve_from_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("PREFECT_SERVER_API_PORT", str(free_port()))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    with serve._alone(tmp_path):
        assert serve.main() == 1
    assert f"process {os.getpid()} is serving from {tmp_path} already" in capsys.readouterr().out
