"""The one exception that a person is meant to read."""

from __future__ import annotations

from pathlib import Path


class TraceForgeError(Exception):
    """Something the user can mend. The message says what, where, why and what to do, in that order.

    The command line prints it without a traceback and exits with status 1; flows let it fail the run.
    """


def page(name: str) -> str:
    """A sentence that points to the page on one kind of error: as the wheel has it, or in docs/errors of the checkout.

    The path is relative only where it leads to the page from the current folder.
    """
    shipped = Path(__file__).with_name("error_pages") / f"{name}.md"
    found = shipped if shipped.is_file() else Path(__file__).parents[1] / "docs" / "errors" / f"{name}.md"
    return f"See {found.relative_to(Path.cwd()) if found.is_relative_to(Path.cwd()) else found}."
