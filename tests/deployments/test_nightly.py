"""The nightly regression on a real server: brought forward, good and bad, its history, and the alarm's webhook."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployments.serving import post, serving, wait_for

REPOSITORY = Path(__file__).parents[2]
# Enough to be a real night, little enough to wait for.
SHORT = {
    "datasets": {"preference": {"max_pairs_per_case": 1}},
    "sft": {"max_steps": 2},
    "preference": {"max_steps": 2},
    "comparison": {"gradient_steps": 2, "oracle_max_length": 256, "oracle_steps": 2},
    "monitoring": {"enabled": False},
}
STAGES = ["ingest", "model", "datasets", "sft", "oracle", "branch_parallel", "compare"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class Receiver:
    """A webhook on this machine, and what was posted to it."""

    url: str
    received: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Night:
    url: str
    env: dict[str, str]
    runs_dir: Path
    webhook: Receiver

    def post(self, path: str, **body: Any) -> Any:
        return post(f"{self.url}/{path}", body)

    def deployment(self) -> dict[str, Any]:
        [found] = [d for d in self.post("deployments/filter") if d["name"] == "nightly-regression"]
        return found

    def next_night(self) -> str:
        """The id of the next scheduled run. (The scheduler of the server makes them ahead of time.)"""
        wanted = {"deployment_id": {"any_": [self.deployment()["id"]]}, "state": {"type": {"any_": ["SCHEDULED"]}}}
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = self.post("flow_runs/filter", flow_runs=wanted, sort="EXPECTED_START_TIME_ASC")
            return bool(found)

        wait_for(there, 120)
        assert found[0]["auto_scheduled"] and "T0" in found[0]["expected_start_time"]
        return found[0]["id"]

    def bring_forward(self, *nights: str, **config: Any) -> None:
        """Let nights begin now: as if the hours until then had passed. Runs that are scheduled are made hours ahead,
        and the server holds events back that follow what it never saw, if that is minutes old: so these are made
        older."""
        database = Path(self.env["PREFECT_HOME"]) / "prefect.db"
        with contextlib.closing(sqlite3.connect(database, timeout=60)) as connection, connection:
            for night in nights:
                connection.execute(
                    "UPDATE flow_run_state SET timestamp = datetime(timestamp, '-8 hours') || '.000000' "
                    "WHERE flow_run_id = ?",
                    (night,),
                )
        for night in nights:
            told = {"config": SHORT | config, "stages": STAGES, "runs_dir": str(self.runs_dir), "history": "nightly"}
            answer = httpx.patch(f"{self.url}/flow_runs/{night}", json={"parameters": told}, timeout=30)
            answer.raise_for_status()
        now = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
        for night in nights:
            state = {"type": "SCHEDULED", "name": "Scheduled", "state_details": {"scheduled_time": now}}
            self.post(f"flow_runs/{night}/set_state", state=state, force=True)

    def state(self, night: str) -> tuple[str, str]:
        run = httpx.get(f"{self.url}/flow_runs/{night}", timeout=30).json()
        return run["state_name"], run["state"]["message"] or ""

    def wait(self, night: str, seconds: float = 500) -> tuple[str, str]:
        wait_for(lambda: self.state(night)[0] in ("Completed", "Failed", "Crashed", "Cancelled"), seconds)
        return self.state(night)

    def history(self) -> list[tuple[str, str]]:
        with contextlib.closing(sqlite3.connect(self.runs_dir / "history" / "nightly.sqlite")) as connection:
            return connection.execute("SELECT verdict, reason FROM runs ORDER BY finished").fetchall()

    def pretend_last_night_had(self, **versions: str) -> None:
        with (
            contextlib.closing(sqlite3.connect(self.runs_dir / "history" / "nightly.sqlite")) as connection,
            connection,
        ):
            [(told,)] = connection.execute("SELECT surroundings FROM runs").fetchall()
            connection.execute("UPDATE runs SET surroundings = ?", (json.dumps(json.loads(told) | versions),))

    def artifact(self, night: str, key: str) -> str:
        found = self.post("artifacts/filter", artifacts={"flow_run_id": {"any_": [night]}, "key": {"any_": [key]}})
        return found[-1]["data"]


@pytest.fixture(scope="module")
def webhook() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}/alarm")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield receiver
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, webhook: Receiver) -> Iterator[Night]:
    with serving(tmp_path_factory.mktemp("prefect"), TRACEFORGE_WEBHOOK_URL=webhook.url) as here:
        yield Night(f"{here.url}/api", here.env, tmp_path_factory.mktemp("runs"), webhook)
        here.process.send_signal(signal.SIGINT)
        here.process.wait(timeout=60)


def test_a_good_night_is_recorded_and_raises_no_alarm(night: Night) -> None:
    run = night.next_night()
    night.bring_forward(run)
    assert night.wait(run)[0] == "Completed", night.state(run)
    assert [verdict for verdict, _ in night.history()] == ["pass"]
    assert "data:image/png;base64," in night.artifact(run, "comparison-trend")
    assert night.webhook.received == []


def test_a_bad_night_fails_is_recorded_with_its_report_and_calls_the_webhook(night: Night) -> None:
    night.pretend_last_night_had(torch="0.0.1")
    run = night.next_night()
    # No strategy agrees to so many digits: what a regression looks like.
    strict = SHORT["comparison"] | {"loss_atol": 1e-15, "gradient_rtol": 1e-15, "adapter_rtol": 1e-15}  # type: ignore[operator]
    night.bring_forward(run, comparison=strict)
    state, message = night.wait(run)
    assert state == "Failed" and "branch_parallel does not agree with the oracle (" in message
    assert " at step " in message, "what is wrong first is named"
    assert "between the last good run" in message and "torch 0.0.1 → " in message, "what changed is named"
    assert [verdict for verdict, _ in night.history()] == ["pass", "fail"]
    assert "Verdict: **fail**" in night.artifact(run, "compare-report")
    assert "fail" in night.artifact(run, "comparison-trend")

    wait_for(lambda: bool(night.webhook.received), 60)
    [posted] = night.webhook.received
    assert posted["flow_run"] == run and posted["state"] == "Failed" and run in posted["url"]
    assert "nightly-regression is Failed" in posted["text"] and "does not agree with the oracle" in posted["text"]


def test_nights_that_were_missed_come_together_and_only_one_is_worked_on(night: Night) -> None:
    first = night.next_night()
    later = (datetime.now(UTC) + timedelta(hours=9)).isoformat()
    waiting = {"type": "SCHEDULED", "state_details": {"scheduled_time": later}}
    where = f"deployments/{night.deployment()['id']}/create_flow_run"
    others = [night.post(where, state=waiting)["id"] for _ in range(2)]
    before = len(night.history())
    night.bring_forward(first, *others)
    ended = sorted(night.wait(run)[0] for run in (first, *others))
    assert ended == ["Cancelled", "Cancelled", "Completed"]
    assert len(night.history()) == before + 1
    assert len(night.webhook.received) == 1, "a cancelled night is no alarm"


def test_setting_up_again_changes_nothing(night: Night) -> None:
    def automations() -> list[tuple[Any, ...]]:
        ours = [a for a in night.post("automations/filter") if a["name"].startswith("TraceForge")]
        return sorted((a["name"], a["id"], sorted(a["trigger"]["expect"]), a["actions"]) for a in ours)

    before = automations()
    done = subprocess.run(
        [sys.executable, "-m", "deployments.setup"],
        cwd=REPOSITORY,
        env=night.env | {"PREFECT_API_URL": night.url},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert automations() == before
    assert len(before) == 2, "one for a bad night, one for a run whose process is gone"
