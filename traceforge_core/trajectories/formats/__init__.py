"""The formats that TraceForge reads, most particular first: the first that matches a value reads it."""

from __future__ import annotations

from typing import Any

from traceforge_core.trajectories.formats.message_list import MessageList
from traceforge_core.trajectories.formats.mini_swe_agent import MiniSweAgent
from traceforge_core.trajectories.formats.protocol import Format

FORMATS: tuple[Format, ...] = (
    MiniSweAgent(1),
    MiniSweAgent(2),
    MessageList(),
)


def detect(value: Any, *, logs: bool = False) -> Format | None:
    """The format of a value, by its content. `logs` asks for those made of all the lines of a file."""
    for candidate in FORMATS:
        if candidate.is_log == logs and candidate.matches(value):
            return candidate
    return None
