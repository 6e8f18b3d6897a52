"""Reading on a cluster: a real Dask scheduler with workers in processes of their own, and what goes wrong with one."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.pipeline import traceforge
from tasks.cluster import cluster_of
from tests.trajectories.make import mini_v1, mini_v2
from traceforge_core.config import IngestConfig, RunConfig, load_config
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import Run
from traceforge_core.trajectories import ingest as ingest_module
from traceforge_core.trajectories import shards
from traceforge_core.trajectories.ingest import ingest
from traceforge_core.trajectories.shards import ShardJob
from traceforge_core.trajectories.survey import Unit


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of several shards with a duplicate and a file that cannot be read."""
    monkeypatch.setattr(ingest_module, "plan", lambda units: shards.plan(units, 4000))
    folder = tmp_path / "corpus"
    for number in range(24):
        case = f"a__b-{number // 3}"
        path = folder / f"run-{number % 3}" / case / f"{case}.traj.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        value = mini_v1(case, note=str(number)) if number % 2 else mini_v2(case, note=str(number))
        path.write_text(json.dumps(value))
    (folder / "again.traj.json").write_bytes((folder / "run-0" / "a__b-0" / "a__b-0.traj.json").read_bytes())
    (folder / "torn.traj.json").write_text('{"messages": [')
    return folder


@pytest.fixture(scope="module")
def dask() -> Iterator[Any]:
    """A client of a scheduler with two worker processes."""
    distributed = pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with cluster, distributed.Client(cluster, set_as_default=False) as client:
        yield client


def configure(corpus: Path, **more: Any) -> RunConfig:
    settings = {"path": str(corpus), "workers": 1, **more}
    return load_config(assignments=[f"ingest.{name}={json.dumps(value)}" for name, value in settings.items()])


def contents(stage: Path) -> dict[str, bytes]:
    files = (path for path in stage.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {path.relative_to(stage).as_posix(): path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_dask_cluster_reads_the_same_and_an_interrupted_ingest_goes_on_there(
    corpus: Path, dask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    ingest(configure(corpus), {}, plain)
    original, read = shards.read_unit, []

    def interrupted(root: Path, unit: Unit, watch: Any = None) -> Any:
        if len(read) == 12:
            raise KeyboardInterrupt
        read.append(unit)
        return original(root, unit, watch)

    monkeypatch.setattr(shards, "read_unit", interrupted)  # in this process only
    runs = tmp_path / "runs"
    with pytest.raises(KeyboardInterrupt):
        traceforge(config=configure(corpus), stages=["ingest"], runs_dir=str(runs))
    (run,) = (Run(path) for path in runs.iterdir() if path.is_dir())
    there = list(run.partial_dir("ingest").glob(".shards/shard-*.json"))
    assert there

    config = configure(corpus, cluster="dask", cluster_address=dask.scheduler.address)
    traceforge(config=config, stages=["ingest"], run="latest", runs_dir=str(runs))
    result = run.result("ingest")
    assert result is not None and result.figures["shards"] > len(there) + 1
    assert contents(result.path) == contents(plain)
    assert len(read) == 12, "this process has read nothing more"
    assert all(dask.run(lambda: "traceforge_core.trajectories.shards" in sys.modules).values())


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("kind", ["dask", "ray"])
def test_without_an_address_a_cluster_is_started_here_and_ended(corpus: Path, tmp_path: Path, kind: str) -> None:
    pytest.importorskip(f"prefect_{kind}", reason=f"the extra `{kind}` is not installed")
    plain, runs = tmp_path / "plain", tmp_path / "runs"
    plain.mkdir()
    ingest(configure(corpus), {}, plain)
    traceforge(config=configure(corpus, cluster=kind), stages=["ingest"], runs_dir=str(runs))
    result = Run(next(path for path in runs.iterdir() if path.is_dir())).result("ingest")
    assert result is not None
    assert {name: result.figures[name] for name in ("found", "read", "duplicates", "quarantined")} == {
        "found": 26,
        "read": 24,
        "duplicates": 1,
        "quarantined": 1,
    }
    assert contents(result.path) == contents(plain)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_shard_that_fails_over_there_is_named_with_what_to_do(corpus: Path, dask: Any, tmp_path: Path) -> None:
    run_jobs = cluster_of(IngestConfig(cluster="dask", cluster_address=dask.scheduler.address))
    assert run_jobs is not None
    job = ShardJob(3, str(corpus), (Unit(("torn.traj.json",)),), str(tmp_path), str(tmp_path / "no-such-file"))
    with pytest.raises(TraceForgeError, match=r"Shard 3 \(torn\.traj\.json .*FileNotFoundError.*finished are kept"):
        list(run_jobs([job]))


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_machines_that_do_not_see_the_same_files_are_told_from_a_shard_without_results(
    corpus: Path, dask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "load_summary", lambda job: None)  # as if the folder over there were another
    with pytest.raises(TraceForgeError, match=r"must see the runs folder and ingest\.path under the same paths"):
        address = dask.scheduler.address
        ingest(configure(corpus), {}, tmp_path, cluster_of(IngestConfig(cluster="dask", cluster_address=address)))


def test_a_cluster_that_does_not_answer_is_an_error_that_says_so() -> None:
    settings = pytest.importorskip("dask.config", reason="the extra `dask` is not installed")
    run_jobs = cluster_of(IngestConfig(cluster="dask", cluster_address="tcp://127.0.0.1:9"))
    assert run_jobs is not None
    with settings.set({"distributed.comm.timeouts.connect": "500ms"}):
        with pytest.raises(TraceForgeError, match=r"dask cluster at tcp://127\.0\.0\.1:9 cannot be reached"):
            list(run_jobs([]))


def test_a_ray_cluster_that_refuses_is_told_with_what_it_may_want(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(contextlib.nullcontext[None]):
        def __init__(self, address: str) -> None:
            self.address = address

        def __enter__(self) -> None:
            raise ConnectionError(f"Failed to connect to Ray cluster at {self.address}")  # what ray.init raises

    monkeypatch.setitem(sys.modules, "prefect_ray", SimpleNamespace(RayTaskRunner=Refused))
    run_jobs = cluster_of(IngestConfig(cluster="ray", cluster_address="127.0.0.1:6379"))
    assert run_jobs is not None
    with pytest.raises(TraceForgeError, match=r"ray cluster at 127\.0\.0\.1:6379 cannot be reached.*RAY_AUTH_MODE"):
        list(run_jobs([]))


@pytest.mark.parametrize("kind", ["dask", "ray"])
def test_a_kind_that_is_not_installed_is_named_with_its_extra(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"prefect_{kind}", None)
    with pytest.raises(TraceForgeError, match=rf"prefect-{kind}, which is not installed.*'\.\[{kind}\]'"):
        cluster_of(IngestConfig(cluster=kind))


def test_no_cluster_means_processes_here_and_the_core_alone_knows_of_none(corpus: Path, tmp_path: Path) -> None:
    assert cluster_of(IngestConfig()) is None
    with pytest.raises(TraceForgeError, match=r"ingest\.cluster=dask is Prefect's business"):
        ingest(configure(corpus, cluster="dask"), {}, tmp_path)
