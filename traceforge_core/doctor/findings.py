"""What the doctor found, one thing at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "note", "warning", "problem", "not tried"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `what` is what was seen, `do` how to mend it ("" where there is nothing to mend).

    status: ok; note (good to know); warning (something will be slower or smaller); problem (something will not work);
    not tried (`what` says why). `figures` are the numbers behind it, JSON-able.
    """

    subject: str
    status: Status
    what: str
    do: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
