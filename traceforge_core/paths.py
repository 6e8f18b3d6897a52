"""Paths as people write them."""

from __future__ import annotations

from pathlib import Path

from traceforge_core.errors import TraceForgeError


def written(path: str | Path) -> Path:
    """A path with `~` and `~name` in front replaced by that home. Raises TraceForgeError where nobody has that name."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise TraceForgeError(
            f"{path} begins with the home of a user that is not known on this machine. Write the whole path."
        ) from None
