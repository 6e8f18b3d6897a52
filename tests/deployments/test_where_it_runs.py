"""Where it runs: Prefect's UI in a browser, a server on PostgreSQL, a remote worker, loopback only, a killed server.

One server for all of it, on a real PostgreSQL where Debian's package is there, else on SQLite.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.deployments.browser import CHROMIUM, Browser
from tests.deployments.serving import post, processes_of, serving, wait_for
from tests.ports import free_port

REPOSITORY = Path(__file__).parents[2]
PASSWORD = "planted-database-password"
POSTGRESQL = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None) or (
    Path(found) if (found := shutil.which("initdb")) else None
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class Site:
    process: subprocess.Popen[str]
    url: str
    env: dict[str, str]
    home: Path
    runs_dir: Path
    database: str | None

    def post(self, path: str, **body: Any) -> Any:
        return post(f"{self.url}/api/{path}", body)

    def deployment(self, name: str) -> str:
        [found] = [each["id"] for each in self.post("deployments/filter") if each["name"] == name]
        return str(found)

    def start(self, name: str, **parameters: Any) -> str:
        where = f"deployments/{self.deployment(name)}/create_flow_run"
        return str(self.post(where, parameters={"runs_dir": str(self.runs_dir), "run": "new"} | parameters)["id"])

    def state(self, flow_run: str) -> str:
        return str(httpx.get(f"{self.url}/api/flow_runs/{flow_run}", timeout=30).json()["state_name"])

    def wait(self, flow_run: str, seconds: float = 240) -> str:
        wait_for(lambda: self.state(flow_run) in ("Completed", "Failed", "Crashed", "Cancelled"), seconds)
        return self.state(flow_run)

    def processes(self) -> list[psutil.Process]:
        return processes_of(self.home)


@pytest.fixture(scope="module")
def postgresql(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str | None]:
    """The URL of a database on a PostgreSQL of our own; None where there is none on this machine."""
    if POSTGRESQL is None:
        yield None
        return
    folder, port = tmp_path_factory.mktemp("postgresql"), free_port()
    (folder / "password").write_text(PASSWORD, encoding="utf-8")
    as_user: dict[str, Any] = {}
    if os.geteuid() == 0:  # it refuses to run as root
        as_user = {"user": "postgres", "group": "postgres", "extra_groups": []}
        for path in (folder, folder / "password"):
            shutil.chown(path, "postgres", "postgres")
        for parent in folder.parents[:-2]:
            parent.chmod(parent.stat().st_mode | 0o011)
    programs, data = POSTGRESQL.parent, folder / "data"
    quiet: dict[str, Any] = {"check": True, "capture_output": True, "cwd": folder, **as_user}
    login = ["-U", "postgres", "-A", "scram-sha-256", f"--pwfile={folder / 'password'}"]
    subprocess.run([programs / "initdb", "-D", data, "-E", "UTF8", "--no-sync", *login], **quiet)
    server = subprocess.Popen(
        [programs / "postgres", "-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", folder, "-F"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        **as_user,
    )
    try:
        asking = [programs / "pg_isready", "-h", "127.0.0.1", "-p", str(port)]
        wait_for(lambda: subprocess.run(asking, capture_output=True).returncode == 0)
        # What the documentation says to make: a role without any privilege, and a database of its own.
        role = f"CREATE ROLE traceforge LOGIN PASSWORD '{PASSWORD}'"
        for command in (role, "CREATE DATABASE prefect OWNER traceforge"):
            ask = [programs / "psql", "-h", "127.0.0.1", "-p", str(port), "-U", "postgres", "-c", command]
            subprocess.run(ask, check=True, capture_output=True, env=os.environ | {"PGPASSWORD": PASSWORD})
        yield f"postgresql+asyncpg://traceforge:{PASSWORD}@127.0.0.1:{port}/prefect"
    finally:
        server.terminate()  # waits for its clients
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=20)
        server.kill()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, postgresql: str | None) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("prefect")
    database = {"PREFECT_SERVER_DATABASE_CONNECTION_URL": postgresql} if postgresql else {}
    with serving(home, **database) as here:
        yield Site(here.process, here.url, here.env, home, tmp_path_factory.mktemp("runs"), postgresql)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_person_fills_in_a_form_in_the_browser_and_watches_it_complete(site: Site, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        browser.open(f"{site.url}/deployments/deployment/{site.deployment('full-pipeline')}/run")
        for group, description in (
            ("Ingest", "Where trajectories come from."),
            ("Model", "The model that is trained."),
            ("Preference", "SimPO, all strategies."),
            ("Comparison", "Agreement with the oracle."),
        ):
            browser.wait_for(f"{group} (Optional)\n{description}")  # fields are grouped, and groups described
        browser.wait_for("Folder or file with trajectories (searched recursively)")  # so are fields
        browser.wait_for("auto\nbranch_parallel\nshared_prefix\n")  # what is allowed is there to choose from
        values = "[...document.querySelectorAll('input, textarea')].map((field) => field.value)"
        for value in ("samples", "tiny", "8192", "new", "runs"):  # those of the preset
            browser.wait_until(f"{values}.includes({value!r})")

        browser.open(f"{site.url}/deployments/deployment/{site.deployment('ingest')}/run")
        browser.wait_for("new, latest, or the id of the run to go on with.")
        field = "[...document.querySelectorAll('input, textarea')].find((field) => field.value === {})"
        browser.type_over(field.format("'latest'"), "new")
        browser.type_over(field.format("'runs'"), str(site.runs_dir))
        browser.submit()
        started = [run for run in site.post("flow_runs/filter") if not run["auto_scheduled"]]
        assert [run["parameters"]["run"] for run in started] == ["new"]
        flow_run = started[0]["id"]

        browser.open(f"{site.url}/runs/flow-run/{flow_run}")
        assert site.wait(flow_run) == "Completed"
        browser.wait_for("Completed")  # the page follows by itself
        browser.click("Task Runs")
        browser.wait_for("ingest")
        browser.click("Artifacts")
        browser.click("ingest-report")
        browser.wait_for("quarantined")
        assert "/artifacts/" in browser.address()
    [run] = [path for path in site.runs_dir.iterdir() if (path / "config.json").is_file()]
    assert (run / "ingest" / "manifest.json").is_file()


def test_nothing_listens_beyond_loopback(site: Site) -> None:
    listening = set()
    for process in site.processes():
        with contextlib.suppress(psutil.Error):
            connections = process.net_connections("inet")
            listening |= {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    assert listening and listening <= {"127.0.0.1", "::1"}, listening


def test_postgresql_holds_everything_and_its_password_stays_secret(site: Site) -> None:
    if site.database is None:
        pytest.skip("no PostgreSQL on this machine (Debian's package is postgresql)")
    flow_run = site.start("ingest")
    assert site.wait(flow_run) == "Completed"

    async def rows() -> list[Any]:
        import asyncpg

        connection = await asyncpg.connect(str(site.database).replace("+asyncpg", ""))
        try:
            found: list[Any] = await connection.fetch("SELECT id::text, state_name FROM flow_run")
            return found
        finally:
            await connection.close()

    assert dict(map(tuple, asyncio.run(rows())))[flow_run] == "Completed"
    assert not list(site.home.glob("*.db")), "there is no SQLite beside it"
    shown = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in site.home.glob("*.log")}
    shown |= {path: httpx.get(f"{site.url}/api/{path}", timeout=30).text for path in ("admin/settings", "health")}
    shown |= {path: json.dumps(site.post(f"{path}/filter")) for path in ("logs", "flow_runs", "artifacts")}
    assert {"server.log", "worker.log", "admin/settings"} <= set(shown)
    for place, text in shown.items():
        assert PASSWORD not in text, f"the database's password stands in {place}"


def test_a_worker_elsewhere_needs_only_the_address(site: Site, tmp_path: Path) -> None:
    env = {name: value for name, value in site.env.items() if not name.startswith(("PREFECT_", "PYTHONPATH"))}
    env |= {"PREFECT_API_URL": f"{site.url}/api", "PREFECT_HOME": str(tmp_path / "its own home")}
    [local] = [p for p in site.processes() if "worker" in p.cmdline() and "start" in p.cmdline()]
    with (tmp_path / "worker.log").open("wb") as log:
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "traceforge", "--name", "remote-box"]
        remote = subprocess.Popen(command, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        local.suspend()  # so that it is the other one that takes the run
        try:
            flow_run = site.start("ingest")
            assert site.wait(flow_run) == "Completed", (tmp_path / "worker.log").read_text()
        finally:
            local.resume()
            remote.terminate()
            remote.wait(timeout=60)
    wanted = {"flow_run_id": {"any_": [flow_run]}}
    wait_for(lambda: any("remote-box" in line["message"] for line in site.post("logs/filter", logs=wanted)))
    names = {each["name"] for each in site.post("work_pools/traceforge/workers/filter")}
    assert {"remote-box", socket.gethostname()} <= names


def test_killing_make_serve_leaves_no_server_and_no_worker(site: Site) -> None:
    """The last one: afterwards there is no site."""
    before = site.processes()
    assert {"server", "worker"} <= {word for process in before for word in process.cmdline()}
    site.process.kill()
    wait_for(lambda: site.processes() == [], seconds=15)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{site.url}/api/health", timeout=5)
