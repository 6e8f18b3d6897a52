"""What an earlier flow run on the same run folder left on the server, where its process ended without a word.

    mark_crashed(flow_run_id)      # while this process holds the run's lock, so nobody else is at work on it

A machine that went down leaves flow runs that say "Running" for ever. Without a server of its own (the command line)
nothing else would ever correct that.
"""

from __future__ import annotations

import logging
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from prefect.states import Crashed

log = logging.getLogger(__name__)


def mark_crashed(flow_run_id: str) -> bool:
    """Mark a flow run as crashed that the server takes to be at work. False where it is not, or is not known there."""
    try:
        number = UUID(flow_run_id)
    except ValueError:
        return False
    with get_client(sync_client=True) as client:
        try:
            state = client.read_flow_run(number).state
            if state is None or state.is_final():
                return False
            message = "Its process is gone; another flow run goes on with its run folder."
            client.set_flow_run_state(number, Crashed(message=message), force=True)
        except (ObjectNotFound, PrefectHTTPStatusError):  # it was on another server
            return False
    log.info("Flow run %s, which worked on this before, is marked as crashed: its process is gone.", flow_run_id)
    return True
