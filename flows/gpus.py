"""GPUs as a resource that flow runs share: the global concurrency limit `gpu`, one slot a card.

    with gpus_held(gpus_needed("branch_parallel", config)):
        ...

Runs of a deployment wait their turn, and fail loudly where the limit is not set up (`python -m deployments.setup`) or
nothing becomes free in time; what they wait for is said after some seconds. Slots of runs on this machine whose process
is gone are given back (slots.py). A flow started by the command line takes slots only where its server has the limit.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Iterator
from uuid import UUID

from prefect import runtime
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.concurrency.sync import concurrency
from prefect.settings import PREFECT_API_URL

from flows.slots import claimed, give_back_of_the_dead
from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.training.seats import visible_gpus

LIMIT = "gpu"
WAIT_SECONDS = 12 * 3600.0
TELL_SECONDS = 5.0
log = logging.getLogger(__name__)


def gpus_needed(stage: str, config: RunConfig) -> int:
    """Cards that a stage with worker processes will use on this machine; 0 where it works on the CPU."""
    there = 0 if config.model.device == "cpu" else len(visible_gpus())
    replicas = config.preference.replicas
    wanted = {"branch_parallel": 2 * replicas, "shared_prefix": replicas}.get(stage, 1)
    return min(wanted, there)


@contextlib.contextmanager
def gpus_held(count: int) -> Iterator[None]:
    """Hold that many slots of the limit inside the block. Raises TraceForgeError where none come free in time."""
    if not count:
        yield
        return
    give_back_of_the_dead()
    with contextlib.ExitStack() as stack:
        holder = None
        if runtime.flow_run.id is not None:
            holder = ConcurrencyLeaseHolder(type="flow_run", id=UUID(runtime.flow_run.id))
            stack.enter_context(claimed(holder.id))
        try:
            with _told_while_waiting(count):
                stack.enter_context(
                    concurrency(
                        LIMIT,
                        occupy=count,
                        timeout_seconds=WAIT_SECONDS,
                        strict=runtime.deployment.id is not None,
                        holder=holder,
                        raise_on_lease_renewal_failure=False,  # a server that restarts must not end a training of days
                    )
                )
        except TimeoutError:
            raise TraceForgeError(
                f"Waited {WAIT_SECONDS / 3600:.0f} hours for {count} slots of the concurrency limit `{LIMIT}`. See who "
                f"holds them with `prefect gcl inspect {LIMIT}`; after a crash, free them with "
                f"`prefect gcl update {LIMIT} --active-slots 0`."
            ) from None
        yield


@contextlib.contextmanager
def _told_while_waiting(count: int) -> Iterator[None]:
    """Say once what is waited for, where it takes longer than some seconds, and go on to look for slots of the dead:
    who holds them now may die."""
    over = threading.Event()

    def keep_looking() -> None:
        told = False
        while not over.wait(TELL_SECONDS):
            if not told:
                told = True
                log.info(
                    "Waiting for %d of the slots of the concurrency limit `%s`, which other runs hold. If none is at "
                    "work any more, free them with: PREFECT_API_URL=%s prefect gcl update %s --active-slots 0",
                    count, LIMIT, PREFECT_API_URL.value(), LIMIT,
                )  # fmt: skip
            give_back_of_the_dead()

    thread = threading.Thread(target=contextvars.copy_context().run, args=(keep_looking,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=TELL_SECONDS)
