"""A run's folder: made, opened, locked, and what of it is there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from traceforge_core.errors import TraceForgeError
from traceforge_core.processes.claim import holder, take
from traceforge_core.runs.files import not_written, write_json
from traceforge_core.runs.stopping import STOP

Figures = dict[str, Any]
ELSEWHERE = "Choose another place with --runs-dir."
TRIED_BYTES = 64 << 10  # what a new run writes before its first stage, which asks for its own room

# What reading a JSON file raises that this library did not write, or that something tore or changed.
NOT_OURS = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class StageResult:
    """A finished stage. `figures` are the numbers worth showing; `seconds` is what the work took when it was done.

    `reused` is True where this call did no work because a result with the same key was there.
    """

    stage: str
    path: Path
    key: str
    figures: Figures
    seconds: float
    reused: bool = False


class RunInUse(TraceForgeError):
    """Another process is at work on the run."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run folder."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @classmethod
    def create(cls, runs_dir: Path, run_id: str | None = None) -> Run:
        """A new, empty run; the id defaults to the time, made unique. Raises TraceForgeError if that cannot be."""
        name = run_id or datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name == "latest":
            raise TraceForgeError(
                f"{name!r} cannot name a run: use letters, digits, '.', '_' and '-' (and not 'latest')."
            )
        for attempt in range(1000):
            path = runs_dir / (name if attempt == 0 else f"{name}-{attempt}")
            try:
                path.mkdir(parents=True)
                return cls(path.resolve())
            except FileExistsError:
                if run_id is not None:
                    raise TraceForgeError(
                        f"The run {run_id} is already there ({path}). Continue it with --run {run_id}."
                    ) from None
            except OSError as error:
                raise not_written(error, f"make the run folder {path}", ELSEWHERE) from None
        raise TraceForgeError(f"No free run id for {name} in {runs_dir}.")

    @classmethod
    def open(cls, runs_dir: Path, run_id: str = "latest", having: Sequence[str] = ()) -> Run:
        """The run with that id; for "latest" the newest that has the stages `having`, or the newest where none has.

        Raises TraceForgeError naming the runs that are there.
        """
        runs = list_runs(runs_dir)
        named = runs_dir / run_id
        if run_id != "latest" and os.path.isdir(named) and not os.path.exists(named / "config.json"):
            raise TraceForgeError(
                f"The folder {named} is no run, or no longer one: config.json, which every run has, is missing. "
                "Put it back, from a copy or from a run with the same settings, or name another run."
            )
        if not runs:
            raise TraceForgeError(
                f"There are no runs in {runs_dir}{_without_config(runs_dir)}. Start one with `traceforge run`, or name "
                "--runs-dir."
            )
        if run_id == "latest":
            whole = (run for run in reversed(runs) if all(run.result(stage) for stage in having))
            return next(whole, runs[-1])
        for run in runs:
            if run.run_id == run_id:
                return run
        known = ", ".join(run.run_id for run in runs[-10:])
        raise TraceForgeError(f"There is no run {run_id!r} in {runs_dir}. Newest runs: {known}.")

    def command(self, *stages: str) -> str:
        """The command line that goes on with this run, from where the process is at work."""
        parts = ["traceforge", "run", "--run", self.run_id]
        if self.path.parent != Path("runs").resolve():
            parts += ["--runs-dir", str(self.path.parent)]
        return shlex.join([*parts, *(["--stages", ",".join(stages)] if stages else [])])

    def stage_dir(self, stage: str) -> Path:
        return self.path / stage

    def partial_dir(self, stage: str) -> Path:
        return self.path / ".partial" / stage

    @property
    def stop_file(self) -> Path:
        """Make a file of this name, and whoever works on the run stops (stopping.py)."""
        return self.path / STOP

    def is_at_work(self) -> bool:
        """Whether a process works on this run."""
        try:
            with self.lock():
                return False
        except RunInUse:
            return True
        except TraceForgeError:  # a run on a read-only disk: nobody can be at work there
            return False

    def result(self, stage: str) -> StageResult | None:
        """The finished stage, or None where it is not there, or an output is missing or of another size."""
        found = self._look_at(stage)
        return found if isinstance(found, StageResult) else None

    def damage(self, stage: str) -> str | None:
        """Why a stage that was finished, or whose place something else has taken, has no result; None where it has one
        or was never finished."""
        found = self._look_at(stage)
        return found if isinstance(found, str) else None

    def _look_at(self, stage: str) -> StageResult | str | None:
        folder = self.stage_dir(stage)
        if not os.path.lexists(folder):
            return None
        path = folder / "manifest.json"
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            for name, output in manifest["outputs"].items():
                path = folder / name
                if path.stat().st_size != output["bytes"]:
                    return f"{path} is not as long as it was written"
            figures, seconds = dict(manifest["figures"]), float(manifest["seconds"])
            return StageResult(stage, folder, str(manifest["key"]), figures, seconds)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        except NOT_OURS:
            return f"{folder / 'manifest.json'} is not as it was written"

    def failure(self, stage: str) -> str | None:
        """Why the last attempt at this stage failed, or None."""
        try:
            failure = json.loads((self.partial_dir(stage) / "failure.json").read_text(encoding="utf-8"))
            return str(failure["message"])
        except NOT_OURS:
            return None

    def save_config(self, config: Mapping[str, Any]) -> None:
        """Raises TraceForgeError where the folder cannot be written to."""
        try:
            write_json(self.path / "config.json", config)
        except OSError as error:
            raise self.not_written(error) from error

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process. Raises RunInUse where another process has it, TraceForgeError where the folder
        cannot be written to."""
        try:
            file = (self.path / ".lock").open("a+")
            taken = take(file)
        except OSError as error:
            raise self.not_written(error) from error
        with file:
            if not taken:
                raise RunInUse(
                    f"The run {self.run_id} is being worked on by process {holder(file)}. "
                    "Wait for it, or start a new run."
                )
            yield

    def gone(self, when: str) -> TraceForgeError:
        """What a person is told where the folder is no longer there."""
        return TraceForgeError(
            f"The run folder {self.path} is gone: it was removed or moved {when}. Where it was moved, go on with it "
            "there (--runs-dir, --run); finished stages are kept in it."
        )

    def not_written(self, error: OSError) -> TraceForgeError:
        """What a person is told where something cannot be written to this run."""
        cure = "Make it writable, or copy it to another place and name that with --runs-dir."
        return not_written(error, f"write to the run folder {self.path}", cure)


def _without_config(runs_dir: Path) -> str:
    """Of folders with finished stages that are no runs for want of a config.json: their names, in brackets."""
    with contextlib.suppress(OSError):
        names = sorted({path.parents[1].name for path in runs_dir.glob("[!.]*/*/manifest.json")})
        if names:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            return f" (config.json, which every run has, is missing from: {shown})"
    return ""


def check_runs_dir(runs_dir: Path) -> None:
    """Try whether a run could be made there; nothing is left behind. Raises TraceForgeError where it could not."""
    try:
        there = next(folder for folder in (runs_dir, *runs_dir.absolute().parents) if folder.exists())
        with tempfile.TemporaryDirectory(prefix=".try-", dir=there) as folder:
            # A full disk may still have room for a folder, or promise what it does not have until it is asked to write.
            write_json(Path(folder, "config.json"), " " * TRIED_BYTES)
    except OSError as error:
        raise not_written(error, f"write to the folder of runs {runs_dir}", ELSEWHERE) from None


def run_folder_of(out_dir: Path) -> Path:
    """`runs/X` for whatever works below `runs/X/.partial`; elsewhere that folder itself."""
    for folder in out_dir.parents:
        if folder.name == ".partial":
            return folder.parent
    return out_dir


def list_runs(runs_dir: Path) -> list[Run]:
    """Every run in the folder, oldest first. A folder that cannot be looked into is no run. Raises TraceForgeError
    where the folder of runs itself cannot be read."""
    try:
        folders = [path for path in runs_dir.iterdir() if not path.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise TraceForgeError(f"Cannot read the folder of runs {runs_dir}: {error.strerror}. {ELSEWHERE}") from None
    used: list[tuple[float, str, Run]] = []
    for path in folders:
        with contextlib.suppress(OSError):  # somebody else's, or pruned this very moment
            used.append(((path / "config.json").stat().st_mtime, path.name, Run(path.resolve())))
    return [run for _, _, run in sorted(used, key=lambda each: each[:2])]


def read_figures(stage_dir: Path) -> Figures:
    """The figures in a finished stage's manifest; empty where there is no manifest."""
    try:
        content: Figures = json.loads((stage_dir / "manifest.json").read_text(encoding="utf-8"))["figures"]
        return content
    except (OSError, ValueError, KeyError):
        return {}
