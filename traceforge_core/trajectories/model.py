"""The canonical trajectory: what every format is read into, and what every dataset is built from.

Plain dataclasses, no validation library: ingest makes millions of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
OutcomeLabel = Literal["resolved", "unresolved"]


@dataclass(slots=True)
class Action:
    """One tool call of an assistant turn. `arguments` is always an object (JSON text is parsed on reading).

    `in_text` is True where the call was read out of the message's own text (agents that write their command into a
    fenced block): the text already shows it, so whoever renders the message must not write it a second time.
    """

    name: str
    arguments: dict[str, Any]
    call_id: str | None = None
    in_text: bool = False


@dataclass(slots=True)
class Message:
    """One message, its text flattened to a string.

    `trainable` is False for an assistant turn the model must never learn to produce (format errors, demonstrations,
    copied context, fake "exit due to cost" turns); such turns stay in the history of later ones.
    `returncode` is the exit status of an observation where the source states it.
    """

    role: Role
    content: str
    reasoning: str | None = None
    actions: list[Action] = field(default_factory=list)
    call_id: str | None = None
    returncode: int | None = None
    trainable: bool = True


@dataclass(slots=True)
class Trajectory:
    """One agent run on one case.

    `trajectory_id` is unique in a corpus and stable between ingests of the same files. `case` is the task worked on,
    `run` tells several runs of one case apart. `source` is the file's path relative to the ingested folder, with
    `:LINE` or `#KEY` behind it where a file holds several trajectories. `outcome` is None where nothing says how it
    ended, and for infrastructure ends (timeout, server error), which are no judgement of the model.
    `tools` are the tool definitions offered to the model, in OpenAI's function format.
    `left_out` counts what was deliberately not kept, by reason (trailing patch, exit message, ...).
    """

    trajectory_id: str
    case: str
    run: str
    format: str
    source: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    outcome: OutcomeLabel | None = None
    outcome_source: str | None = None
    exit_status: str | None = None
    model: str | None = None
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def turns(self) -> list[int]:
        """Positions in `messages` of the assistant turns."""
        return [i for i, message in enumerate(self.messages) if message.role == "assistant"]
