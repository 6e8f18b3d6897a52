"""Slots of a concurrency limit that a flow run held whose process is gone: they are given back by the next that waits.

    with claimed(flow_run_id):         # while slots are held by a lease of this flow run
        ...
    give_back_of_the_dead()            # releases leases whose flow run's process has ended without doing so

A lease outlives its process, and an embedded server revokes none, also not those that are long over. So a process that
holds slots has a file beside the leases, in PREFECT_HOME, which the kernel gives back when it ends, however it ends: a
run that lives keeps its slots, even one that is stopped with Ctrl-Z for a day.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_HOME
from prefect.utilities.asyncutils import run_coro_as_sync

from traceforge_core.processes.claim import take

log = logging.getLogger(__name__)


def _folder() -> Path:
    return Path(PREFECT_HOME.value()) / "slot_holders"


@contextlib.contextmanager
def claimed(flow_run_id: UUID) -> Iterator[None]:
    """Keep the slots of this flow run from being given back inside the block. Where the block fails the claim stays
    behind, to be looked after: its slots may not have been released."""
    path = _folder() / str(flow_run_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a+") as file:
            # Somebody who looks for the dead may have found it before it was claimed, and removed it.
            if take(file) and path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield
                path.unlink(missing_ok=True)
                return
        time.sleep(0.05)


def give_back_of_the_dead() -> None:
    """Release what ended processes of this machine held. What cannot be released now is left for the next time."""
    for path in sorted(_folder().glob("*-*-*-*-*")):
        with contextlib.suppress(OSError, httpx.HTTPError), path.open("r+") as file:
            if not take(file):
                continue
            leases = cast(list[UUID], run_coro_as_sync(_leases_of(UUID(path.name))))
            with get_client(sync_client=True) as client:
                for lease in leases:
                    client.release_concurrency_slots_with_lease(lease)
                    log.info("Gave back the slots of flow run %s, whose process is gone.", path.name)
            path.unlink()


async def _leases_of(flow_run_id: UUID) -> list[UUID]:
    """Its leases in PREFECT_HOME, those included that are over, which no list of Prefect's holds together."""
    from prefect.server.concurrency.lease_storage.filesystem import ConcurrencyLeaseStorage

    storage = ConcurrencyLeaseStorage()
    found = []
    for path in storage.storage_path.glob("*-*.json"):
        lease = await storage.read_lease(UUID(path.stem))
        holder = lease.metadata.holder if lease is not None and lease.metadata is not None else None
        if lease is not None and holder is not None and holder.id == flow_run_id:
            found.append(lease.id)
    return found
