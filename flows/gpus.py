"""GPUs as a resource that flow runs share: the global concurrency limit `gpu`, one slot a card.

    with gpus_held(gpus_needed("branch_parallel", config)):
        ...

Runs of a deployment wait their turn, and fail loudly where the limit is not set up (`python -m deployments.setup`) or
nothing becomes free in time. A flow started by the command line takes slots only where its server has the limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prefect import runtime
from prefect.concurrency.sync import concurrency

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.training.seats import visible_gpus

LIMIT = "gpu"
WAIT_SECONDS = 12 * 3600.0


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
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(
                concurrency(
                    LIMIT,
                    occupy=count,
                    timeout_seconds=WAIT_SECONDS,
                    strict=runtime.deployment.id is not None,
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
