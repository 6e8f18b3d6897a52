"""The command `traceforge`: a thin front on the flow and on plain functions, for people without a server.

    traceforge run --set sft.max_steps=20          traceforge ingest ~/logs --out corpus          traceforge show latest

Exit status: 0 done, 1 not done (the message says what to do), 2 done, but a strategy does not agree with the oracle,
130 stopped by Ctrl-C. It is the same where nobody reads what is printed. With --json stdout is exactly one JSON object;
everything else goes to stderr.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from flows.cli.unread import outlive_readers


def main() -> NoReturn:
    """The command `traceforge`."""
    outlive_readers()
    try:
        from flows.cli.commands import app
        from flows.cli.endings import run_to_the_end
        from flows.embedded import leave
    except KeyboardInterrupt:  # before there was anything to end
        sys.exit(130)
    leave(run_to_the_end(app))
