"""The wheel is the library alone: the command `traceforge` needs flows/ and tasks/, which stay in the checkout."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WithoutTheCommand(BuildHookInterface):
    """`pip install --editable .` makes the command, which works there; a wheel would carry one that cannot."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            self.metadata.core.scripts.clear()
