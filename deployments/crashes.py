"""Flow runs whose process is gone are marked as crashed, by a Prefect automation that listens to their heartbeats.

A flow run of a deployment sends a heartbeat every 30 seconds (prefect.yaml sets PREFECT_FLOWS_HEARTBEAT_FREQUENCY; by
itself Prefect sends one in 3 minutes). Where the worker still lives it notices the end of a run within seconds; where
worker and run died together (a machine that went down) the automation does, 5 minutes after the last heartbeat. That is
ten beats: a server that was away for a moment, or a machine that swaps, is no crash.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture, ResourceSpecification

from deployments.alarm import put_automation

NAME = "TraceForge: mark flow runs whose process is gone as crashed"
SILENCE = timedelta(minutes=5)
HEARTBEAT = "prefect.flow-run.heartbeat"
# After these no heartbeat is to be expected. Cancelling is not among them: a run may die while it is cancelled.
NOT_RUNNING = ("Completed", "Failed", "Crashed", "TimedOut", "Cancelled", "Paused", "Suspended", "AwaitingRetry")
log = logging.getLogger(__name__)


def set_up_crash_detection(client: SyncPrefectClient, silence: timedelta = SILENCE) -> None:
    """Make the automation, or bring it up to date. `silence`: time without a heartbeat after which a run is crashed."""
    put_automation(
        client,
        AutomationCore(
            name=NAME,
            description="Made by python -m deployments.setup, which changes it back.",
            enabled=True,
            trigger=EventTrigger(
                after={HEARTBEAT},
                expect={HEARTBEAT} | {f"prefect.flow-run.{state}" for state in NOT_RUNNING},
                match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
                # Of deployments only: a flow that somebody calls from Python may send heartbeats more rarely.
                match_related=[
                    ResourceSpecification({"prefect.resource.role": "flow", "prefect.resource.name": "traceforge"}),
                    ResourceSpecification({"prefect.resource.role": "deployment"}),
                ],
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=silence,
            ),
            actions=[
                ChangeFlowRunState(
                    name=None,
                    state=StateType.CRASHED,
                    message="No sign of life: its process, its worker or its machine is gone. The next run goes on.",
                )
            ],
        ),
    )
    log.info("flow runs without a heartbeat for %d s are marked as crashed", silence.total_seconds())
