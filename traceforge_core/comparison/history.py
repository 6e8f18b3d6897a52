"""The comparison's history: one row a run in SQLite, what changed when it went bad, and the trends as a report.

    record(Path("runs/history/nightly.sqlite"), entry_of(run))
    entries = read(Path("runs/history/nightly.sqlite"))
    change = blame(entries)                 # None while the last run is good
    write_trend(entries, folder)            # trend.md, trend.html, trend.png

A run is written once, by its id: recorded again (a retried flow), its row is replaced. Several processes may write.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from traceforge_core.comparison.parity import read_training
from traceforge_core.comparison.report import planted_in_short
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import Run, installed_versions, source_hash

logger = logging.getLogger(__name__)
BUSY_SECONDS = 60.0
SETTING = "setting "
# What a person can do, by how sqlite's name of the error begins.
MENDED_BY = {
    ("SQLITE_BUSY", "SQLITE_LOCKED"): f"Another process has held it for {BUSY_SECONDS:.0f} s: end that.",
    ("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "PermissionError", "FileExistsError", "NotADirectoryError"): (
        "Let this user write to that file and its folder."
    ),
    ("SQLITE_FULL", "SQLITE_IOERR", "OSError"): "Look at the disk: is it full, or away?",
}
DAMAGED = "Move that file away to begin a new one."
TABLE = """
CREATE TABLE IF NOT EXISTS runs (
    run_id TEXT PRIMARY KEY, finished TEXT NOT NULL, verdict TEXT NOT NULL, reason TEXT NOT NULL, path TEXT NOT NULL,
    surroundings TEXT NOT NULL, figures TEXT NOT NULL
)"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One run. verdict: pass, fail, undecided, or error where it did not get as far as a comparison. reason: why, in a
    sentence. surroundings: what a change of could explain a change of the verdict, by name: library versions, driver,
    device, TraceForge's own source, data, model, settings. figures: numbers by "strategy/name"."""

    run_id: str
    finished: str
    verdict: str
    reason: str
    path: str
    surroundings: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return self.verdict == "pass"


@dataclass(frozen=True, slots=True)
class Change:
    """Since when runs are bad. last_good: None where none ever was good. changed: (name, before, after) of everything
    in the surroundings that is not as it was in the last good run."""

    first_bad: Entry
    last_good: Entry | None
    changed: list[tuple[str, str, str]]

    @property
    def sentence(self) -> str:
        if self.last_good is None:
            return f"Run {self.first_bad.run_id} is the first bad one, and no run before it was good."
        between = f"between the last good run {self.last_good.run_id} and the first bad one {self.first_bad.run_id}"
        if not self.changed:
            return f"Nothing that is recorded changed {between}: look at what is not (hardware, cosmic rays, chance)."
        told = ", ".join(f"{name} {before} → {after}" for name, before, after in self.changed)
        return f"What changed {between}: {told}."


def entry_of(run: Run) -> Entry:
    """What a run with a finished comparison says. Raises TraceForgeError where there is none."""
    compared = run.result("compare")
    if compared is None:
        raise TraceForgeError(f"Run {run.run_id} has no finished comparison to record. Run the stage compare first.")
    report = json.loads((compared.path / "report.json").read_text(encoding="utf-8"))
    figures: dict[str, float] = {}
    reasons = []
    for name, told in report["strategies"].items():
        parity, steps = told["parity"], told["steps"]
        figures |= {
            f"{name}/max loss difference": parity["max_loss"],
            f"{name}/adapter difference": parity["adapter"],
            f"{name}/seconds a step": sum(step["seconds"] or 0.0 for step in steps) / max(1, len(steps)),
        }
        if parity["max_gradient"] is not None:
            figures[f"{name}/max gradient difference"] = parity["max_gradient"]
        for place in told["verdict"]["places"]:
            figures[f"{name}/{place['name']}, share of its limit"] = place["statistic"] / place["limit"]
        if told["verdict"]["outcome"] != "pass" or report["verdict"] == "pass":
            reasons.append(f"{name}: {told['verdict']['reasons'][0]}")
        if told["exact"] is not None and told["exact"]["outcome"] != "pass":  # what rounding hid from the other one
            reasons.append(f"{name} in float32: {told['exact']['reasons'][0]}")
    if planted := report.get("planted_faults"):
        figures["planted faults/missed"] = len(planted["missed"])
        if planted["verdict"] != "pass":
            reasons.append(planted_in_short(planted).replace("**", ""))
    for model, evaluated in (report["evaluation"] or {}).items():
        for kind, names in (("pairs", ("accuracy", "margin")), ("actions", ("loss", "token_accuracy"))):
            for name in names:
                if (evaluated.get(kind) or {}).get(name) is not None:
                    figures[f"{model}/held-out {kind} {name}"] = evaluated[kind][name]
    reason = "; ".join(told.rstrip(".") for told in reasons)
    return Entry(run.run_id, _now(), report["verdict"], reason, str(run.path), surroundings(run), figures)


def failed_entry(run: Run, error: str) -> Entry:
    """A run that ended before its comparison, and why: a new version may do that too."""
    return Entry(run.run_id, _now(), "error", error.strip().split("\n")[0], str(run.path), surroundings(run))


def surroundings(run: Run) -> dict[str, str]:
    """What this run was made with, as far as it got: versions, driver, settings, and from the oracle its device, data
    and model."""
    told = dict(installed_versions()) | {"traceforge source": source_hash()[:12]} | _settings(run)
    if driver := _driver():
        told["nvidia driver"] = driver
    with contextlib.suppress(TraceForgeError):
        training = read_training(run.stage_dir("oracle"))
        told |= training["versions"]
        told["device"] = training["device_name"]
        told |= {name: training["start"][name][:12] for name in ("data order", "base weights", "tokenizer")}
    return told


def record(history: Path, entry: Entry) -> None:
    """Write an entry, or write it again."""
    values = (
        entry.run_id, entry.finished, entry.verdict, entry.reason, entry.path,
        json.dumps(entry.surroundings, sort_keys=True), json.dumps(entry.figures, sort_keys=True),
    )  # fmt: skip
    with _open(history) as connection:
        connection.execute(TABLE)
        connection.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?)", values)
    logger.info("Recorded %s (%s) in %s.", entry.run_id, entry.verdict, history)


def read(history: Path, last: int = 200) -> list[Entry]:
    """The last entries, oldest first. [] where there is no history yet."""
    if not history.exists():
        return []
    with _open(history) as connection:
        rows = connection.execute("SELECT * FROM runs ORDER BY finished DESC, rowid DESC LIMIT ?", (last,)).fetchall()
        return [
            Entry(run_id, finished, verdict, reason, path, json.loads(surrounded), json.loads(figures))
            for run_id, finished, verdict, reason, path, surrounded, figures in reversed(rows)
        ]


def blame(entries: Sequence[Entry]) -> Change | None:
    """What changed when runs went bad; None where the last one is good, or there is none. Undecided counts as bad."""
    if not entries or entries[-1].good:
        return None
    last_good = max((index for index, entry in enumerate(entries) if entry.good), default=-1)
    first_bad = entries[last_good + 1]
    if last_good < 0:
        return Change(first_bad, None, [])
    before, after = entries[last_good].surroundings, first_bad.surroundings
    # An ended run may not have come as far as its data: what it does not say has not changed.
    names = sorted(set(before) & set(after)) if first_bad.verdict == "error" else sorted(set(before) | set(after))
    changed = [
        (name, before.get(name, "(none)"), after.get(name, "(none)"))
        for name in names
        if not name.startswith(SETTING) or (name in before and name in after)  # a new field has its default
        if before.get(name) != after.get(name)
    ]
    return Change(first_bad, entries[last_good], changed)


@contextlib.contextmanager
def _open(history: Path) -> Iterator[sqlite3.Connection]:
    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(sqlite3.connect(history, timeout=BUSY_SECONDS)) as connection, connection:
            yield connection
    except (sqlite3.DatabaseError, OSError, ValueError) as error:
        kind = getattr(error, "sqlite_errorname", type(error).__name__)
        what = next((told for begins, told in MENDED_BY.items() if kind.startswith(begins)), DAMAGED)
        raise TraceForgeError(f"The history {history} cannot be used ({error}). {what}") from error


def _settings(run: Run) -> dict[str, str]:
    """The run's whole configuration, a value a field: "setting preference.beta"."""
    try:
        config = json.loads((run.path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {f"{SETTING}{name}": json.dumps(value) for name, value in _flat(config, "")}


def _flat(config: Any, above: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(config, dict):
        yield above, config
        return
    for name, value in config.items():
        yield from _flat(value, f"{above}.{name}" if above else name)


def _now() -> str:
    """Not when the comparison was made: that may be another run's, reused, and older than a bad run in between."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library
        return None
    try:
        version: Any = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)
    finally:
        pynvml.nvmlShutdown()
