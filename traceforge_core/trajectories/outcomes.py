"""Who solved what: outcome files, and which trajectory each of them speaks about.

A trajectory almost never says whether it solved its case. Known outcome files: a SWE-bench run report (lists of ids),
a per-instance report (flat, or nested under the instance id), Harbor and terminal-bench results. One file speaks about
one run, so it applies to a trajectory of its case where its name names the trajectory's run, else to what lies nearest
below its folder; where several runs are meant equally, none gets the label. Contradictions are kept and reported, not
resolved.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
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


@dataclass(frozen=True, slots=True)
class Decision:
    """What the outcome files say about one trajectory. `conflict` says why there is no label though files speak of
    it."""

    label: OutcomeLabel | None = None
    source: str | None = None
    conflict: str | None = None


@dataclass(slots=True)
class _Report:
    source: str
    anchor: PurePosixPath
    names: frozenset[str]


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


class Outcomes:
    """All outcome files of a corpus, to be asked for one trajectory at a time.

    `trajectory_paths` are the corpus's trajectory files relative to its root; they decide where a report's statements
    apply.
    """

    def __init__(self, trajectory_paths: Sequence[str] = ()) -> None:
        self._by_case: dict[str | None, list[tuple[_Report, Claim]]] = {}
        self._stated: dict[tuple[str, str | None], list[tuple[OutcomeLabel, str]]] = {}
        self._folders: set[str] = set()
        self._names_of_folders: set[str] = set()
        self._runs: dict[str, set[str]] = {}
        for folder in {PurePosixPath(path).parent for path in trajectory_paths}:
            self._folders.update(parent.as_posix() for parent in (folder, *folder.parents))
            self._names_of_folders.update(folder.parts)

    def settle(self, trajectory_paths: Iterable[str]) -> None:
        """Note, once all files are added, in which runs the cases that they name are there (by the files' names)."""
        for path in trajectory_paths:
            parts = PurePosixPath(path)
            for key in {parts.name.split(".")[0], parts.parent.name, stem_of(path)}:
                if key in self._by_case:
                    self._runs.setdefault(key, set()).add(run_folder(path, key))

    def add(self, source: str, claims: Iterable[Claim]) -> None:
        """Add one file's statements. `source` is its path relative to the corpus's root (or a name of its own for a
        file that lies elsewhere)."""
        path = PurePosixPath(source)
        outside = path.is_absolute()
        anchor = PurePosixPath(".") if outside else path.parent
        while anchor.as_posix() not in self._folders and anchor != PurePosixPath("."):
            anchor = anchor.parent
        report = _Report(source, anchor, frozenset(self._names(path)))
        for claim in claims:
            case = claim.case
            if case is None and anchor != path.parent and path.parent.name != "verifier":
                case = path.parent.name
            self._by_case.setdefault(case, []).append((report, claim))

    def state(self, case: str, run: str | None, label: OutcomeLabel, source: str) -> None:
        """Add what the user's own table says; it outranks every file found in the corpus."""
        self._stated.setdefault((case, run), []).append((label, source))

    def to_json(self) -> str:
        """All of it, for the processes that read shards. File names that are no UTF-8 pass through unharmed."""
        reports = list({id(report): report for found in self._by_case.values() for report, _ in found}.values())
        number = {id(report): index for index, report in enumerate(reports)}
        return json.dumps(
            {
                "reports": [[report.source, report.anchor.as_posix(), sorted(report.names)] for report in reports],
                "claims": [
                    [case, number[id(report)], claim.case, claim.label, claim.detail]
                    for case, found in self._by_case.items()
                    for report, claim in found
                ],
                "stated": [[case, run, told] for (case, run), told in self._stated.items()],
                "folders": sorted(self._folders),
                "names_of_folders": sorted(self._names_of_folders),
                "runs": {case: sorted(runs) for case, runs in self._runs.items()},
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Outcomes:
        """What `to_json` wrote."""
        tree = json.loads(text)
        outcomes = cls()
        reports = [
            _Report(source, PurePosixPath(anchor), frozenset(names)) for source, anchor, names in tree["reports"]
        ]
        for case, report, claimed, label, detail in tree["claims"]:
            outcomes._by_case.setdefault(case, []).append((reports[report], Claim(claimed, label, detail)))
        outcomes._stated = {
            (case, run): [(label, source) for label, source in told] for case, run, told in tree["stated"]
        }
        outcomes._folders, outcomes._names_of_folders = set(tree["folders"]), set(tree["names_of_folders"])
        outcomes._runs = {case: set(runs) for case, runs in tree["runs"].items()}
        return outcomes

    def decide(self, case: str, run: str, path: str) -> Decision:
        """What the files say about the trajectory of a case in the file at `path`, relative to the corpus's root."""
        for name in (run, *re.split(r"[/#]", run), None):
            if stated := self._stated.get((case, name)):
                return _agree(stated)
        folder = PurePosixPath(path).parent
        above = {folder.as_posix(), *(parent.as_posix() for parent in folder.parents)}
        found = [(report, claim) for report, claim in self._by_case.get(case, []) if report.anchor.as_posix() in above]
        near = (folder, folder.parent)  # a file without a case speaks of its own folder, as Harbor's `agent/` has it
        found += [(report, claim) for report, claim in self._by_case.get(None, []) if report.anchor in near]
        if not found:
            return Decision()
        parts = {*folder.parts, run} - {case}  # a folder of the case names no run
        named = [(report, claim) for report, claim in found if report.names & parts]
        if not named:
            named = [(report, claim) for report, claim in found if not report.names - {case}]
            if not named:
                return Decision()
            deepest = max(len(report.anchor.parts) for report, _ in named)
            named = [(report, claim) for report, claim in named if len(report.anchor.parts) == deepest]
            anchor = named[0][0].anchor
            runs = {r for r in self._runs.get(case, ()) if anchor == PurePosixPath(".") or _below(r, anchor)}
            if len(runs) > 1:
                files = ", ".join(sorted({report.source for report, _ in named}))
                return Decision(
                    conflict=f"{files}: several runs of {case} lie below it, and its name names none of them"
                )
        return _agree([(claim.label, f"{report.source} ({claim.detail})") for report, claim in named])

    def _names(self, path: PurePosixPath) -> Iterator[str]:
        """Folder names of the corpus that the report's name or path names: the runs that it is about."""
        stem = re.sub(r"(\.eval|\.report)?\.json(l)?$", "", path.name)
        wanted = {stem, stem.rpartition(".")[2], *path.parent.parts}
        own = set(path.parent.parts)
        for name in wanted & self._names_of_folders:
            if name not in own or not self._is_common(name, path):
                yield name

    def _is_common(self, name: str, path: PurePosixPath) -> bool:
        """A folder above the report that also holds trajectories says where the report lies, not what it is about."""
        parts = path.parent.parts
        folder = PurePosixPath(*parts[: parts.index(name) + 1]).as_posix()
        return folder in self._folders


def _agree(labels: list[tuple[OutcomeLabel, str]]) -> Decision:
    if len({label for label, _ in labels}) > 1:
        return Decision(conflict="; ".join(sorted({f"{label} in {where}" for label, where in labels})))
    return Decision(labels[0][0], labels[0][1])


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _below(run: str, anchor: PurePosixPath) -> bool:
    return run == anchor.as_posix() or run.startswith(anchor.as_posix() + "/")


def stem_of(path: str) -> str:
    """A trajectory file's name without what formats and packers add to it."""
    name = PurePosixPath(path).name
    while True:
        for suffix in (".gz", ".zst", ".json", ".jsonl", ".ndjson", ".traj", ".parquet", ".output", ".events"):
            if name.lower().endswith(suffix) and len(name) > len(suffix):
                name = name[: -len(suffix)]
                break
        else:
            return name


def run_folder(path: str, case: str) -> str:
    """The folder that tells a run of a case from the others: the file's path without what names the case."""
    parent = PurePosixPath(path).parent
    parts = [part for part in parent.parts if part != case]
    return "/".join(parts)
