"""Who solved what: which trajectory each statement of an outcome file (`outcome_files`) speaks about.

A trajectory almost never says whether it solved its case. One file speaks about one run, so it applies to a trajectory
of its case where its name names the trajectory's run, else to what lies nearest below its folder; where several runs
are meant equally, none gets the label. Contradictions are kept and reported, not resolved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from traceforge_core.trajectories.model import OutcomeLabel
from traceforge_core.trajectories.outcome_files import Claim


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
