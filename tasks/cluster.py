"""Reading trajectories on a Dask or Ray cluster, through Prefect's task runners, by configuration alone.

    traceforge run --set ingest.cluster=dask --set ingest.cluster_address=tcp://10.0.0.5:8786

Every machine of the cluster needs this checkout installed with the extra of its kind (`pip install -e .[dask]`), the
corpus and the runs folder under the same paths (a network disk), and, where the flow runs with a Prefect server, a way
to it. A shard is one task: it reads files and leaves its part in the run's folder; no trajectory travels over the
network. Shards that are finished are not read again, so an interrupted ingest goes on, on a cluster or off it. Without
an address a cluster of `ingest.workers` processes is started on this machine and ended with the ingest.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from prefect.task_runners import TaskRunner

from traceforge_core.config import IngestConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.trajectories import shards
from traceforge_core.trajectories.ingest import RunJobs
from traceforge_core.trajectories.shards import ShardJob, Summary

log = logging.getLogger(__name__)


@task(
    name="Read a shard",
    task_run_name="shard-{job.index}",
    tags=["ingest", "cpu"],
    cache_policy=NO_CACHE,  # read_shard itself knows what is done
    persist_result=False,
)
def read_shard(job: ShardJob) -> None:
    """Read one shard where this runs. What it found lies in the shard's folder."""
    shards.read_shard(job)


def cluster_of(config: IngestConfig) -> RunJobs | None:
    """How to read the shards on the cluster that `config` names; None where it names none.

    Nothing is started before there is something to read. Raises TraceForgeError where the packages are not there; what
    it returns raises it where a shard cannot be read over there.
    """
    if config.cluster == "none":
        return None
    runner = _dask(config) if config.cluster == "dask" else _ray(config)

    def run_jobs(jobs: Sequence[ShardJob]) -> Iterator[Summary]:
        where = f"the {config.cluster} cluster{f' at {config.cluster_address}' if config.cluster_address else ''}"
        waiting = [job for job in jobs if shards.load_summary(job) is None]
        log.info("reading %d shards on %s, %d are there already", len(waiting), where, len(jobs) - len(waiting))
        with _started(runner, where):
            futures = {job.index: runner.submit(read_shard, {"job": job}) for job in waiting}
            for number, job in enumerate(jobs, 1):
                if job.index in futures:
                    _wait(futures.pop(job.index), job, where)
                    log.info("read shard %d of %d", number, len(jobs))
                summary = shards.load_summary(job)
                if summary is None:
                    raise TraceForgeError(
                        f"Shard {job.index} was read on {where}, but {job.summary} is not there. Its machines must see "
                        "the runs folder and ingest.path under the same paths as this one: put both on a disk that all "
                        "of them share, or set ingest.cluster=none."
                    )
                yield summary

    return run_jobs


def _wait(future: PrefectFuture[Any], job: ShardJob, where: str) -> None:
    try:
        future.result()
    except TraceForgeError:
        raise
    except Exception as error:
        raise TraceForgeError(
            f"Shard {job.index} ({job.units[0].paths[0]} and what follows) could not be read on {where}: "
            f"{type(error).__name__}: {error}. Mend it and run ingest again; the shards that were finished are kept."
        ) from error


@contextlib.contextmanager
def _started(runner: TaskRunner[Any], where: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(runner)
            _ = getattr(runner, "client", None)  # Dask's connects only when it is looked at
        except (OSError, RuntimeError) as error:
            token = "If it asks for a token, set RAY_AUTH_MODE=token here too. " if "ray cluster" in where else ""
            raise TraceForgeError(
                f"{where[0].upper()}{where[1:]} cannot be reached or started: {error}. Start it, mend "
                f"ingest.cluster_address, or set ingest.cluster=none to read on this machine alone. {token}".rstrip()
            ) from None
        yield


def _dask(config: IngestConfig) -> TaskRunner[Any]:
    try:
        from prefect_dask import DaskTaskRunner
    except ImportError:
        raise _missing("dask") from None
    if config.cluster_address:
        return DaskTaskRunner(address=config.cluster_address)
    here = {"n_workers": _workers(config), "threads_per_worker": 1, "dashboard_address": ":0"}
    return DaskTaskRunner(cluster_kwargs=here)


def _ray(config: IngestConfig) -> TaskRunner[Any]:
    try:
        from prefect_ray import RayTaskRunner
    except ImportError:
        raise _missing("ray") from None
    runner: TaskRunner[Any]
    if config.cluster_address:
        runner = RayTaskRunner(address=config.cluster_address)
    else:
        runner = RayTaskRunner(init_kwargs={"num_cpus": _workers(config), "include_dashboard": False})
    return runner


def _workers(config: IngestConfig) -> int:
    return config.workers or os.cpu_count() or 1


def _missing(kind: str) -> TraceForgeError:
    return TraceForgeError(
        f"ingest.cluster={kind} needs the package prefect-{kind}, which is not installed here. Install it with "
        f"pip install -e '.[{kind}]' on every machine of the cluster, or set ingest.cluster=none."
    )
