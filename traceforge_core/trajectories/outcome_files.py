"""What an outcome file states: claims about cases, in whatever form evaluations and people write them.

Known are a SWE-bench run report (lists of ids), a per-instance report (flat, or nested under the instance id), Harbor
and terminal-bench results, rows, and a user's own table.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from traceforge_core.errors import TraceForgeError
from traceforge_core.trajectories.model import OutcomeLabel

# Words in the first bytes of a file that make it worth parsing as an outcome file.
HINTS = (
    b'"resolved_ids"',
    b'"ids_resolved"',
    b'"completed_ids"',
    b'"submitted_instances"',
    b'"patch_successfully_applied"',
    b'"patch_exists"',
    b'"tests_status"',
    b'"no_generation"',
    b'"is_resolved"',
    b'"n_resolved"',
    b'"verifier_result"',
    b'"trial_name"',
    b'"reward"',
)
_RESOLVED_LISTS = ("resolved_ids", "ids_resolved", "resolved")
# An empty patch is an answer, and a wrong one; a harness error or an unfinished evaluation is no answer.
_UNRESOLVED_LISTS = ("unresolved_ids", "ids_unresolved", "empty_patch_ids", "unresolved", "no_generation")
_AGENT_ENDS = re.compile(
    r"submitted|limits?_?exceeded|(repeated)?_?format_?error|exit_(cost|context|format|forfeit)|maximum iteration"
    r"|finished|success|completed|stuck",
    re.IGNORECASE,
)
_INFRASTRUCTURE = re.compile(
    r"time_?out|timed out|time_?exceeded|error|exception|unavailable|refused|rate.?limit"
    r"|exit_(api|error|environment|total)|crash|killed|interrupt|abort|cancel|early_exit|skipped",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Claim:
    """One statement of an outcome file. `case` None: about every trajectory in the file's own folder."""

    case: str | None
    label: OutcomeLabel
    detail: str = ""


def is_infrastructure(exit_status: str | None) -> bool:
    """Whether a run ended for reasons that are no judgement of the model: timeouts, server errors, crashes."""
    if not exit_status or _AGENT_ENDS.search(exit_status):
        return False
    return bool(_INFRASTRUCTURE.search(exit_status))


def claims_in(value: Any) -> list[Claim] | None:
    """The statements of an outcome file; None where the value is no outcome file."""
    if isinstance(value, list):
        return _rows(value)
    if not isinstance(value, dict):
        return None
    for kind in (_run_report, _flat, _nested, _harbor):
        if (claims := kind(value)) is not None:
            return claims
    return _rows(value.get("results"))


def _run_report(value: Mapping[str, Any]) -> list[Claim] | None:
    keys = [key for key in _RESOLVED_LISTS if _is_ids(value.get(key))]
    if not keys or "messages" in value:
        return None
    claims: list[Claim] = []
    for key in keys:
        claims += [Claim(case, "resolved", key) for case in value[key]]
    solved = {claim.case for claim in claims}
    for key in _UNRESOLVED_LISTS:
        if _is_ids(value.get(key)):
            claims += [Claim(case, "unresolved", key) for case in value[key] if case not in solved]
    return claims


def _flat(value: Mapping[str, Any]) -> list[Claim] | None:
    label = as_label(value.get("resolved"))
    if label is None or not ({"patch_successfully_applied", "tests_status", "patch_exists"} & value.keys()):
        return None
    case = value.get("instance_id") if isinstance(value.get("instance_id"), str) else None
    claims = [Claim(case, label, "resolved")]
    if label == "resolved" and value.get("patch_successfully_applied") is False:  # real: the file contradicts itself
        claims.append(Claim(case, "unresolved", "patch_successfully_applied"))
    return claims


def _nested(value: Mapping[str, Any]) -> list[Claim] | None:
    claims = []
    for case, report in value.items():
        inner = _flat(report) if isinstance(report, dict) else None
        if inner is None:
            return None
        claims += [Claim(case, claim.label, claim.detail) for claim in inner]
    return claims or None


def _harbor(value: Mapping[str, Any]) -> list[Claim] | None:
    if "trial_name" not in value and "verifier_result" not in value:
        return None if set(value) != {"reward"} else _reward(value["reward"])
    result = value.get("verifier_result")
    rewards = result.get("rewards") if isinstance(result, dict) else None
    reward = rewards.get("reward", next(iter(rewards.values()), None)) if isinstance(rewards, dict) else None
    # The task's name is not used: a trial's folder names it too, and what lies there is what the result is about.
    return [] if value.get("exception_info") or reward is None else _reward(reward)


def _reward(reward: Any) -> list[Claim] | None:
    if isinstance(reward, bool) or not isinstance(reward, (int, float)):
        return None
    return [Claim(None, "resolved" if reward >= 1 else "unresolved", "reward")]


def _rows(value: Any) -> list[Claim] | None:
    """terminal-bench: `[{task_id, is_resolved, failure_mode}]`. A failure of the infrastructure says nothing."""
    if not isinstance(value, list) or not value:
        return None
    claims = []
    for row in value:
        case = row.get("task_id") if isinstance(row, dict) else None
        if not isinstance(case, str) or "is_resolved" not in row:
            return None
        failure = row.get("failure_mode")
        broke = isinstance(failure, str) and is_infrastructure(failure)
        if (label := as_label(row["is_resolved"])) == "resolved" or (label and not broke):
            claims.append(Claim(case, label, "is_resolved"))
    return claims


def as_label(value: Any) -> OutcomeLabel | None:
    """A label from what files use for one: booleans, 0 and 1, `true`/`false`, `resolved`/`unresolved`."""
    if isinstance(value, str):
        value = {"true": True, "1": True, "resolved": True, "yes": True}.get(
            value.strip().lower(),
            {"false": False, "0": False, "unresolved": False, "no": False}.get(value.strip().lower()),
        )
    if isinstance(value, bool) or (isinstance(value, (int, float)) and value in (0, 1)):
        return "resolved" if value else "unresolved"
    return None


def read_table(path: Path) -> list[tuple[str, str | None, OutcomeLabel]]:
    """A user's own table of outcomes: (case, run or None, label) of each row.

    CSV or TSV with a header, or JSON Lines, with the columns `case` and `resolved` and, where a case has several runs,
    `run`. Raises TraceForgeError naming the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceForgeError(f"{path} (ingest.outcomes) cannot be read: {error}. Give a UTF-8 file.") from None
    rows: Iterable[tuple[int, Any]]
    if path.suffix.lower() in (".csv", ".tsv"):
        reader = csv.DictReader(text.splitlines(), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        rows = ((reader.line_num, row) for row in reader)
    else:
        rows = ((number, _json_row(line)) for number, line in enumerate(text.splitlines(), 1) if line.strip())
    table = []
    for number, row in rows:
        case = (row.get("case") or row.get("instance_id")) if isinstance(row, dict) else None
        label = as_label(row.get("resolved")) if isinstance(row, dict) else None
        if not isinstance(case, str) or label is None:
            raise TraceForgeError(
                f"{path} line {number} (ingest.outcomes): expected the columns case, run (may be empty) and resolved "
                "(true or false). Mend the line or remove the file from ingest.outcomes."
            )
        run = row.get("run")
        table.append((case, run if isinstance(run, str) and run else None, label))
    return table


def _json_row(line: str) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return None


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
