"""Ready pairs from a JSONL file: one object a line with `prompt`, `chosen` and `rejected`.

Each of the three is a list of chat messages, or a string (a user message, or an assistant turn). `tools` (definitions),
`case` and `id` may stand beside them. Lines that cannot be read are counted by reason, never fatal.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from traceforge_core.datasets.messages import messages_from_json
from traceforge_core.datasets.pairs import Branch, Candidate
from traceforge_core.errors import TraceForgeError
from traceforge_core.paths import written
from traceforge_core.trajectories.model import Message, Trajectory

log = logging.getLogger(__name__)


def given_candidates(file: Path, dropped: Counter[str]) -> Iterator[Candidate]:
    """The pairs of a file. Raises TraceForgeError where the file cannot be opened."""
    try:
        lines = written(file).read_bytes().splitlines()
    except OSError as error:
        raise TraceForgeError(
            f"Cannot read the file of given pairs {file}: {error.strerror}. Check datasets.preference.given, or take "
            "`given` out of datasets.preference.miners."
        ) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _candidate(json.loads(line), number, file.name)
        except (ValueError, TypeError, AttributeError) as error:
            dropped["given: unreadable line"] += 1
            log.warning("%s line %d is set aside: %s", file, number, error)


def _candidate(row: Any, number: int, name: str) -> Candidate:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with prompt, chosen and rejected, not a {type(row).__name__}")
    missing = [key for key in ("prompt", "chosen", "rejected") if not row.get(key)]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing or empty")
    prompt = _messages(row["prompt"], "user")
    tools = row.get("tools") or []
    tools = json.loads(tools) if isinstance(tools, str) else tools
    own = str(row.get("id") or row.get("pair_id") or f"{name}:{number}")
    prompt_text = json.dumps(row["prompt"], sort_keys=True)
    case = str(row.get("case") or f"given-{hashlib.sha256(prompt_text.encode()).hexdigest()[:12]}")
    branches = []
    for side in ("chosen", "rejected"):
        completion = _messages(row[side], "assistant")
        while completion and completion[-1].role != "assistant":
            completion.pop()
        if not completion or completion[0].role != "assistant":
            raise ValueError(f"{side} must begin with an assistant turn")
        identity = f"{own}/{side}"
        trajectory = Trajectory(identity, case, own, "given", f"{name}:{number}", prompt + completion, tools)
        branches.append(
            Branch(identity, partial(_same, trajectory), len(prompt), len(prompt), len(trajectory.messages))
        )
    return Candidate("given", case, len(json.dumps(row)), branches[0], branches[1])


def _same(trajectory: Trajectory) -> Trajectory:
    return trajectory


def _messages(value: Any, role: Any) -> list[Message]:
    return messages_from_json([{"role": role, "content": value}] if isinstance(value, str) else value)
