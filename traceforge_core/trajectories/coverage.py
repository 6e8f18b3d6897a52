"""Whether reading lost something: every text of a source file against the canonical trajectories read from it.

    for path, count in compare(value, trajectories).unexplained.items():
        ...

    report = check_corpus(folder)      # over whole files, counts by format

A text that is not found again is left out for one of the reasons below, or it is unexplained: a fault of the reader,
or a part of the format that nobody has seen yet.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from traceforge_core.trajectories.model import Trajectory
from traceforge_core.trajectories.reading import read_unit
from traceforge_core.trajectories.survey import Quarantined, survey

MIN_LENGTH = 20
# Why a text is not in the canonical trajectory, by where it stands in the source. First match wins.
REASONS: tuple[tuple[str, str], ...] = (
    (r"(^|\.)(submission|git_patch|generated_patch|model_patch|patch|edited_files\d+)(\.|\[|$)", "patch"),
    (r"(^|\.)(test_output|eval_logs|apply_patch_output|test_patch|gold_patch|report)(\.|\[|$)", "evaluation log"),
    (
        r"(encrypted_content|signature|thought_signature|critic_result|reasoning_details\[\]\.data)$",
        "encrypted reasoning",
    ),
    (r"(^|\.)(config|replay_config|metadata|instance|kwargs|litellm_extra_body|sandbox_policy)(\.|$)", "configuration"),
    (r"(^|\.)(environment|base_commit|hash|swe_(agent|rex)_\w+|git|rate_limits|cutoff_date)(\.|$)", "configuration"),
    (r"(^|\.)(traceback|exception_str|exception|exception_info)$", "crash report"),
    (r"(^|\.)(state|open_file|working_dir|execution_status|agent_state)(\.|$)", "state of the environment"),
    (
        r"(^|\.)(raw_output|toolUseResult|extras|extra_info|translated_ipython_code)(\.|\[|$)",
        "raw form of an observation",
    ),
    (r"(^|\.)(llm_metrics|usage|stats|final_metrics|metrics|model_stats|usage_to_metrics)(\.|$)", "accounting"),
    (
        r"((^|\.|_)(id|ids|uuid|Uuid|Id|ID)|timess?tamp|_time|cwd|system_fingerprint|session_id|leafUuid)(\[\])?$",
        "identifier",
    ),
    (r"(^|\.)(snapshot|summary|result_explanation|comment_success|notes)(\.|\[|$)", "summary by another program"),
    (r"^\[\]\.message$", "summary by another program"),  # OpenHands V0: an event in words for a person
    (r"^(issue|issue_type|history\[\]\.code|\[\]\.observation\.command)(\.|$)", "copy of the task or of an action"),
    (r"^trajectory\[\]\.(action|observation|thought|messages|query)(\.|\[|$)", "form of a message before it was shown"),
    (
        r"(^|\.)(event_type|kind|kernel_init_code|full_output_save_dir|requestId|sessionId|response\.model)$|^agent\.",
        "configuration",
    ),
)
_REASONS = tuple((re.compile(pattern), reason) for pattern, reason in REASONS)
_MESSAGE = re.compile(r"(content|text|message|payload|value|thought)(\.\w+)*(\[\])*$|^\[\]")
# Whole messages that are left out on purpose; the reader counts them in `left_out`.
_COUNTED = {
    "exit_message": "exit message",
    "trailing_patch": "trailing patch",
    "synthetic_turn": "turn that no model wrote",
    "interface_event": "event for the user interface",
    "bookkeeping_event": "bookkeeping event",
    "turn_without_message": "line without a message",
    "line_that_is_no_event": "line without a message",
    "observation_title": "title of an observation",
    "secret_replaced": "secret",
}


@dataclass(slots=True)
class Comparison:
    """How many texts of a source were found again, why others were left out, and which have no reason (by path)."""

    found: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    unexplained: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """One flat table: `found`, `left out: REASON` and `lost: PATH`."""
        left_out = {f"left out: {reason}": count for reason, count in self.left_out.items()}
        return {"found": self.found} | left_out | {f"lost: {path}": count for path, count in self.unexplained.items()}

    def add(self, other: Comparison) -> None:
        self.found += other.found
        self.left_out.update(other.left_out)
        self.unexplained.update(other.unexplained)
        self.examples = other.examples | self.examples


def compare(value: Any, trajectories: list[Trajectory]) -> Comparison:
    """Compare one source value with what was read from it. Texts of fewer than 20 characters are not looked at."""
    result = Comparison()
    texts = list(dict.fromkeys(text for trajectory in trajectories for text in canonical_texts(trajectory)))
    whole = set(texts)
    everything = "\0".join(texts)
    counted = Counter({reason: sum(t.left_out.get(key, 0) for t in trajectories) for key, reason in _COUNTED.items()})
    seen: set[str] = set()
    for path, text in source_texts(value):
        if text in seen:
            continue
        seen.add(text)
        if text in whole or text.strip() in everything:
            result.found += 1
        elif reason := next((reason for pattern, reason in _REASONS if pattern.search(path)), None):
            result.left_out[reason] += 1
        elif all(part.strip() in everything for part in _pieces(text)):
            result.found += 1
        elif _MESSAGE.search(path) and (reason := next((r for r, n in counted.items() if n > 0), None)):
            counted[reason] -= 1  # as many texts as there are messages that the reader says it left out
            result.left_out[reason] += 1
        else:
            result.unexplained[path] += 1
            result.examples.setdefault(path, text[:200])
    return result


def check_corpus(folder: Path, every: int = 1) -> dict[str, Comparison]:
    """Read every n-th unit of a corpus and compare it with its source: a comparison a format."""
    results: dict[str, Comparison] = {}

    def watch(value: Any, trajectories: list[Trajectory]) -> None:
        results.setdefault(trajectories[0].format, Comparison()).add(compare(value, trajectories))

    for unit in survey(folder).units[::every]:
        for item in read_unit(folder, unit, watch):
            assert isinstance(item, (Trajectory, Quarantined))
    return results


def canonical_texts(trajectory: Trajectory) -> Iterator[str]:
    """Every text that a canonical trajectory holds."""
    for message in trajectory.messages:
        yield message.content
        if message.reasoning:
            yield message.reasoning
        for action in message.actions:
            yield action.name
            yield from (text for _, text in source_texts(action.arguments, minimum=1))
    yield from (text for _, text in source_texts(trajectory.tools, minimum=1))
    yield from filter(None, (trajectory.case, trajectory.run, trajectory.model, trajectory.exit_status))


def source_texts(value: Any, path: str = "", minimum: int = MIN_LENGTH) -> Iterator[tuple[str, str]]:
    """(where, text) of every text in a JSON value; JSON inside a text is looked into."""
    if isinstance(value, str):
        if len(value) < minimum:
            return
        inner = _decoded(value)
        if inner is None:
            yield path, value
        else:
            yield from source_texts(inner, path, minimum)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from source_texts(item, f"{path}.{key}" if path else str(key), minimum)
    elif isinstance(value, list):
        for item in value:
            yield from source_texts(item, f"{path}[]", minimum)


def _decoded(text: str) -> Any:
    if text[0] not in "{[" or text.rstrip()[-1:] not in "}]":
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _pieces(text: str) -> list[str]:
    """A text without the tags around reasoning, which the reader takes away."""
    return [piece for piece in re.split(r"</?think(?:ing)?>", text) if piece.strip()]
