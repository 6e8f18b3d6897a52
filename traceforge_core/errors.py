"""The one exception that a person is meant to read."""

from __future__ import annotations

from pathlib import Path


class TraceForgeError(Exception):
    """Something the user can mend. The message says what, where, why and what to do, in that order.

    The command line prints it without a traceback and exits with status 1; flows let it fail the run.
    """


def page(name: str) -> str:
    """A sentence that points to the page on one kind of error: in docs/errors of a checkout, or as the wheel has it."""
    shipped = Path(__file__).with_name("error_pages") / f"{name}.md"
    return f"See {shipped if shipped.is_file() else f'docs/errors/{name}.md'}."
