"""The alarm of the nightly regression: a Prefect automation that calls a webhook when that deployment's run goes bad.

The webhook is the URL in TRACEFORGE_WEBHOOK_URL (a chat's incoming webhook, ntfy, anything that takes a POST with
JSON), or a Webhook block named `traceforge-nightly` that is on the server already. Without either there is no alarm,
and setup says so.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from uuid import UUID

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import CallWebhook
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture, ResourceSpecification
from prefect.exceptions import ObjectNotFound

NIGHTLY = "nightly-regression"
BLOCK = "traceforge-nightly"
NAME = "TraceForge: the nightly regression went bad"
VARIABLE = "TRACEFORGE_WEBHOOK_URL"
BAD = ("Failed", "Crashed", "TimedOut")
log = logging.getLogger(__name__)


def set_up_alarm(client: SyncPrefectClient) -> bool:
    """Make the automation, or bring it up to date. Returns False where there is no webhook to call."""
    block = _webhook(client)
    if block is None:
        log.info(
            "no alarm for %s: set %s, or make a Webhook block named %s, and run this again", NIGHTLY, VARIABLE, BLOCK
        )
        return False
    put_automation(client, _alarm(block))
    log.info("%s calls a webhook when it fails, crashes or takes too long", NIGHTLY)
    return True


def put_automation(client: SyncPrefectClient, automation: AutomationCore) -> None:
    """Make an automation, or bring the one of that name up to date."""
    there = client.read_automations_by_name(automation.name)
    if there:
        client.update_automation(there[0].id, automation)
    else:
        client.create_automation(automation)


def _webhook(client: SyncPrefectClient) -> UUID | None:
    if url := os.environ.get(VARIABLE):
        Webhook(url=url, headers={"Content-Type": "application/json"}).save(BLOCK, overwrite=True)
    try:
        return client.read_block_document_by_name(BLOCK, "webhook").id
    except ObjectNotFound:
        return None


def _alarm(block: UUID) -> AutomationCore:
    said = f"flow_run.name ~ ' of {NIGHTLY} is ' ~ flow_run.state.name ~ ': ' ~ flow_run.state.message"
    fields = {"text": said, "flow_run": "flow_run.id|string", "state": "flow_run.state.name", "url": "flow_run|ui_url"}
    # tojson: a message with quotes or newlines must not break the payload.
    payload = "{" + ", ".join(f'"{name}": {{{{ ({value})|tojson }}}}' for name, value in fields.items()) + "}"
    return AutomationCore(
        name=NAME,
        description="Made by python -m deployments.setup, which changes it back.",
        enabled=True,
        trigger=EventTrigger(
            expect={f"prefect.flow-run.{state}" for state in BAD},
            match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
            match_related=ResourceSpecification(
                {"prefect.resource.role": "deployment", "prefect.resource.name": NIGHTLY}
            ),
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[CallWebhook(block_document_id=block, payload=payload)],
    )
