"""What lies in a corpus: trajectory files in reading order, outcome files, and everything else, counted.

    corpus = survey(folder)
    corpus.units, corpus.outcome_files, corpus.other_files

Only the first bytes of a file are looked at, and outcome files are parsed. A unit is a file, or a folder's files that
only together make up a run: the single events of an OpenHands conversation, the logged calls of one agent.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from traceforge_core.trajectories.formats.protocol import Unreadable
from traceforge_core.trajectories.outcome_files import HINTS, Claim, claims_in
from traceforge_core.trajectories.parsing import DATA_SUFFIXES, PACKED_SUFFIXES, parse, read_head, read_whole

SKIPPED_FOLDERS = {".git", "__pycache__", "node_modules", ".venv"}
OUTCOME_FILE_LIMIT = 32 << 20
_JSON_START = re.compile(rb'\s*(\{\s*"|\{\s*\}|\[\s*[\[{"\]])')
_EVENT_FILE = re.compile(r"event-\d+-[\w-]+\.json(\.gz|\.zst)?")
_CALL_FILE = re.compile(r"(.+)-\d{9,}(\.\d+)?\.json(\.gz|\.zst)?")


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Something that was set aside: `reason` is a fixed word to count by, `detail` says where and why."""

    source: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Unit:
    """What is read at once. Paths are relative to the corpus's root; `bytes` is their size on disk.

    `span` is a part of one large JSON Lines file: first byte, end, and the number of its first line.
    """

    paths: tuple[str, ...]
    bytes: int = 0
    span: tuple[int, int, int] | None = None

    @property
    def label(self) -> str:
        """How reports name it: the file, or the folder where it is several."""
        first = self.paths[0]
        return label_of(first if len(self.paths) == 1 else os.path.dirname(first) or ".")


@dataclass(slots=True)
class Corpus:
    """What lies in a folder."""

    root: Path
    units: list[Unit] = field(default_factory=list)
    outcome_files: dict[str, list[Claim]] = field(default_factory=dict)
    other_files: Counter[str] = field(default_factory=Counter)
    unreadable: list[Quarantined] = field(default_factory=list)

    def paths(self) -> Iterator[str]:
        """Every trajectory file, as reports name it."""
        for unit in self.units:
            for path in unit.paths:
                yield label_of(path)


def survey(path: Path) -> Corpus:
    """Sort the files below a folder; a single file is taken as a trajectory file."""
    if path.is_file():
        return Corpus(path.parent, [Unit((path.name,), path.stat().st_size)])
    corpus = Corpus(path)

    def refused(error: OSError) -> None:
        where = label_of(os.path.relpath(error.filename or path, path))
        corpus.unreadable.append(Quarantined(where, "cannot_read", error.strerror or str(error)))

    for folder, subfolders, names in os.walk(path, onerror=refused):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
        corpus.other_files.update(  # os.walk does not go there: links may lead in circles
            "linked folder" for name in subfolders if os.path.islink(os.path.join(folder, name))
        )
        found = [name for name in sorted(names) if _is_trajectory_file(corpus, Path(folder, name))]
        for _, group in groupby(found, key=_group):
            members = [Path(folder, name) for name in group]
            size = sum(member.stat().st_size for member in members if member.exists())
            corpus.units.append(Unit(tuple(os.path.relpath(member, path) for member in members), size))
    corpus.units.sort(key=lambda unit: unit.paths[0])
    return corpus


def find_outcomes(path: Path) -> dict[str, list[Claim]]:
    """The outcome files at a path (a file, or a folder of them), by their full path."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    found = ((file, claims_of(file)) for file in files)
    return {file.as_posix(): claims for file, claims in found if claims is not None}


def claims_of(file: Path) -> list[Claim] | None:
    """What an outcome file states; None where it is none."""
    try:
        if file.stat().st_size > OUTCOME_FILE_LIMIT:
            return None
        data = read_whole(file)
        if file.parent.name == "verifier" and file.name == "reward.txt":
            return claims_in({"reward": float(data)})
        return claims_in(parse(data))
    except (Unreadable, OSError, ValueError):
        return None


def is_data_name(name: str) -> bool:
    """Whether a file's name promises data, so that it must be read or reported."""
    name = name.lower()
    for suffix in PACKED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name.endswith(DATA_SUFFIXES)


def label_of(relative: str) -> str:
    """A path as it stands in reports: forward slashes, and valid Unicode whatever the file system holds."""
    return os.fsencode(relative.replace(os.sep, "/")).decode("utf-8", "replace")


def _is_trajectory_file(corpus: Corpus, file: Path) -> bool:
    """Whether to read a file as trajectories; files of other kinds are noted in the corpus."""
    if not file.is_file():
        where = label_of(os.path.relpath(file, corpus.root))
        corpus.unreadable.append(Quarantined(where, "not_a_file", _what_it_is(file)))
        return False
    head = read_head(file)
    if any(hint in head for hint in HINTS) or file.name == "reward.txt":
        claims = claims_of(file)
        if claims is not None:
            corpus.outcome_files[label_of(os.path.relpath(file, corpus.root))] = claims
            return False
    companion = _companion(file, head)
    if companion:
        corpus.other_files[companion] += 1
        return False
    if is_data_name(file.name) or _JSON_START.match(head.removeprefix(b"\xef\xbb\xbf")) or head[:4] == b"PAR1":
        return True
    corpus.other_files[file.suffix.lower() or "without suffix"] += 1
    return False


def _what_it_is(file: Path) -> str:
    """Why an entry of a folder cannot be read as a file."""
    try:
        mode = file.lstat().st_mode
    except OSError as error:
        return error.strerror or str(error)
    if stat.S_ISLNK(mode):
        return f"a link to {label_of(os.readlink(file))}, where no file is"
    return "a named pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def _companion(file: Path, head: bytes) -> str | None:
    """What a JSON file is that lies beside trajectories and holds none: predictions, a conversation's state."""
    if b'"model_patch"' not in head and not file.name.startswith("base_state.json"):
        return None
    try:
        value = parse(read_whole(file)) if file.stat().st_size <= OUTCOME_FILE_LIMIT else None
    except (Unreadable, OSError):
        return None
    if isinstance(value, dict) and {"agent", "id"} <= value.keys() and "messages" not in value:
        return "conversation state"
    rows = list(value.values()) if isinstance(value, dict) and "model_patch" not in value else value
    rows = [rows] if isinstance(rows, dict) else rows
    told = {"messages", "trajectory", "history"}
    if isinstance(rows, list) and rows and all(isinstance(row, dict) and "model_patch" in row for row in rows):
        return None if any(told & row.keys() for row in rows) else "predictions"
    return None


def _group(name: str) -> str:
    """Equal for the files of a folder that belong together."""
    if _EVENT_FILE.fullmatch(name):
        return "event-"
    call = _CALL_FILE.fullmatch(name)
    return f"{call.group(1)}-" if call else name
