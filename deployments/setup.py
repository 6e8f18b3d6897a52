"""What the deployments need on the Prefect server: process work pool, concurrency limit `gpu`, the automation that
notices crashed runs, the night's alarm.

    PREFECT_API_URL=http://127.0.0.1:4200/api python -m deployments.setup

Run it on the machine with the GPUs, as often as you like: what is there already is brought up to date.
"""

from __future__ import annotations

import logging
import sys

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_API_URL

from deployments.alarm import set_up_alarm
from deployments.crashes import set_up_crash_detection
from flows.gpus import LIMIT
from traceforge_core.errors import TraceForgeError
from traceforge_core.monitoring.gpu import gpu_count

POOL = "traceforge"
log = logging.getLogger(__name__)


def set_up(client: SyncPrefectClient, gpus: int) -> None:
    """Make the work pool, and the limit with one slot a GPU. Without a GPU one slot stays, which nothing takes."""
    try:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", description="TraceForge on this machine"))
        log.info("made the work pool %s", POOL)
    except ObjectAlreadyExists:
        log.info("the work pool %s is there", POOL)
    client.upsert_global_concurrency_limit_by_name(LIMIT, max(1, gpus))
    log.info("the concurrency limit %s has %d slots", LIMIT, max(1, gpus))


def main() -> None:
    """Set up the server that PREFECT_API_URL names."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)
    if not PREFECT_API_URL.value():
        raise TraceForgeError("PREFECT_API_URL is not set, so there is no server to set up. `make serve` starts one.")
    logging.getLogger("deployments").setLevel(logging.INFO)
    with get_client(sync_client=True) as client:
        set_up(client, gpu_count())
        set_up_crash_detection(client)
        set_up_alarm(client)


if __name__ == "__main__":
    try:
        main()
    except TraceForgeError as error:
        sys.exit(str(error))
