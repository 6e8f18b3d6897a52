"""Actions that agents without tool calls write into their text: fenced blocks and `<function=…>` XML.

The text stays as it is; the actions found in it are marked `in_text`.
"""

from __future__ import annotations

import re
from typing import Any

from traceforge_core.trajectories.model import Action

LANGUAGES = ("bash", "mswea_bash_command")
_FUNCTION = re.compile(r"<function=([\w.-]{1,100})>(.*?)(?:</function>|(?=<function=)|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([\w.-]{1,100})>(.*?)</parameter>", re.DOTALL)
_BLOCK = re.compile(r"^```[^\n`]*\n(.*?)\n?^```[ \t]*$", re.DOTALL | re.MULTILINE)


def fenced_command(text: str, language: str | None = None) -> list[Action]:
    """The one command in a fenced block of a shell language; none where there is not exactly one."""
    if "```" not in text:
        return []
    for name in (language,) if language else LANGUAGES:
        found = re.findall(rf"```{name}[ \t]*\r?\n(.*?)\n[ \t]*```", text, re.DOTALL)
        if len(found) == 1:
            return [Action("bash", {"command": found[0]}, in_text=True)]
    return []


def last_block(text: str) -> list[Action]:
    """The command in the last fenced block of any kind, which is what SWE-agent runs."""
    if "```" not in text:
        return []
    found = _BLOCK.findall(text)
    return [Action("bash", {"command": found[-1].strip()}, in_text=True)] if found else []


def xml_functions(text: str) -> list[Action]:
    """Calls written as `<function=name><parameter=key>value</parameter></function>`; the end may be missing, as where
    the model's turn was cut at it."""
    if "<function=" not in text:
        return []
    return [
        Action(name, {key: _trimmed(value) for key, value in _PARAMETER.findall(body)}, in_text=True)
        for name, body in _FUNCTION.findall(text)
    ]


def _trimmed(value: str) -> Any:
    """A parameter's value without the line breaks that set it off from its tags."""
    return value.removeprefix("\n").removesuffix("\n")
