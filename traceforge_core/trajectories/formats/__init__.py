"""The formats that TraceForge reads, most particular first: the first that matches a value reads it."""

from __future__ import annotations

from typing import Any

from traceforge_core.trajectories.formats.atif import Atif
from traceforge_core.trajectories.formats.chat_rows import ChatRows
from traceforge_core.trajectories.formats.claude_code import ClaudeCode
from traceforge_core.trajectories.formats.codex import Codex
from traceforge_core.trajectories.formats.completion_log import CompletionLog
from traceforge_core.trajectories.formats.message_list import MessageLines, MessageList
from traceforge_core.trajectories.formats.mini_swe_agent import MiniSweAgent
from traceforge_core.trajectories.formats.nebius import Nebius
from traceforge_core.trajectories.formats.openhands_sdk import OpenHandsSdk
from traceforge_core.trajectories.formats.openhands_v0 import OpenHandsEvents, OpenHandsOutput
from traceforge_core.trajectories.formats.protocol import Format
from traceforge_core.trajectories.formats.sharegpt import ShareGpt
from traceforge_core.trajectories.formats.swe_agent import SweAgent

FORMATS: tuple[Format, ...] = (
    MiniSweAgent(1),
    MiniSweAgent(2),
    CompletionLog(),
    SweAgent(),
    OpenHandsOutput(),
    Atif(),
    Nebius(),
    ShareGpt(),
    ChatRows(),
    MessageList(),
    OpenHandsSdk(),
    OpenHandsEvents(),
    ClaudeCode(),
    Codex(),
    MessageLines(),
)


def detect(value: Any, *, logs: bool = False) -> Format | None:
    """The format of a value, by its content. `logs` asks for those made of all the lines of a file."""
    for candidate in FORMATS:
        if candidate.is_log == logs and candidate.matches(value):
            return candidate
    return None
