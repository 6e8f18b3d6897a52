"""How far a stage is, as a progress artifact on the run's page that moves while the stage works.

    with progress_shown("sft", run.partial_dir("sft")) as shown:
        ...
        shown.done = "done in 19.3 s"

A thread reads what the stage tells of itself (traceforge_core/progress.py) every few seconds and brings the artifact up
to date. A stage that is done before it has told anything gets none. The artifact's key is `<stage>-progress`.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

from prefect.artifacts import create_progress_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactUpdate

from traceforge_core.runs.progress import Progress, read_progress

log = logging.getLogger(__name__)
POLL_SECONDS = 2.0
END_SECONDS = 10.0


@contextlib.contextmanager
def progress_shown(stage: str, folder: Path) -> Iterator[Shown]:
    """Show what the stage at work in `folder` tells of itself while the block runs. A server that does not answer is
    no reason for the stage to fail: it is asked again the next time."""
    stop = threading.Event()
    shown = Shown(stage)
    # In a copy of this context, the artifact belongs to the task run from which it is made.
    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(_keep_showing, shown, folder, stop), daemon=True
    )
    thread.start()
    try:
        yield shown
    finally:
        stop.set()
        thread.join(timeout=END_SECONDS)


def _keep_showing(shown: Shown, folder: Path, stop: threading.Event) -> None:
    with get_client(sync_client=True) as client:
        ended = False
        while not ended:
            ended = stop.wait(POLL_SECONDS)
            try:
                shown.bring_up_to_date(client, None if ended else read_progress(folder))
            except Exception as error:  # whatever the network does
                log.debug("The progress of %s could not be shown: %s", shown.stage, error)


class Shown:
    """What is shown of a stage. `done`: the words for its end; without them a stage stays where it was."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.done: str | None = None
        self._artifact: UUID | None = None
        self._last: tuple[float, str] = (0.0, "")

    def bring_up_to_date(self, client: SyncPrefectClient, told: Progress | None) -> None:
        """`told`: None at the end."""
        percent, text = self._last
        if told is not None:
            percent, text = told.percent or 0.0, told.sentence()
        elif self.done is not None:
            percent, text = 100.0, self.done
        if (percent, text) == self._last or (self._artifact is None and told is None):
            return
        if self._artifact is None:
            key = f"{self.stage.replace('_', '-')}-progress"
            made = create_progress_artifact(percent, key=key, description=text)
            assert isinstance(made, UUID)
            self._artifact = made
        else:
            # Not update_progress_artifact: in Prefect 3.9.1 it opens a client for every call and closes none.
            client.update_artifact(self._artifact, ArtifactUpdate(data=percent, description=text))
        self._last = (percent, text)
