"""The one exception that a person is meant to read."""

from __future__ import annotations


class TraceForgeError(Exception):
    """Something the user can mend. The message says what, where, why and what to do, in that order.

    The command line prints it without a traceback and exits with status 1; flows let it fail the run.
    """


def page(name: str) -> str:
    """A sentence that points to the page of docs/errors on one kind of error."""
    return f"See docs/errors/{name}.md."
