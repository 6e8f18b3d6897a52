"""The file `STOP` in a run's folder: a way to stop a run that needs no server, no terminal and no process number.

Training ends after the step at work and leaves a checkpoint of it; whatever else is at work is finished, and nothing
more is begun. Work that cannot be gone on with (an evaluation, a noise run) is ended at once.
"""

from __future__ import annotations

from traceforge_core.errors import TraceForgeError

STOP = "STOP"


class StoppedByFile(TraceForgeError):
    """Somebody wanted it: no fault of the work."""
