"""Runs on disk: where a stage's outputs lie, how they get there whole, and when they can be used again.

    runs/<run id>/
        config.json                the configuration last used
        <stage>/manifest.json      what a finished stage was made from and what it made
        <stage>/...                its outputs
        .partial/<stage>/          a stage at work, or one that failed (with failure.json); never read by other stages

A stage works in `.partial/<stage>`, its manifest is written last, and the folder is renamed into place. Paths in a
manifest are relative to the run, so a run folder can be moved. The key of a stage is a hash of its configuration, the
keys of its inputs and the library's source: the same key means the same result, which is then reused, from this run or
from another run beside it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from traceforge_core.errors import TraceForgeError, page
from traceforge_core.progress import forget_progress
from traceforge_core.stopping import STOP

Figures = dict[str, Any]
RECORDED_VERSIONS = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "accelerate",
    "bitsandbytes",
    "unsloth",
    "prefect",
)

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


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a stage works from: finished stages by name. `outside` are hashes of things outside the run, by name."""

    stages: Mapping[str, StageResult] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)


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
                raise TraceForgeError(
                    f"Cannot make the run folder {path}: {error.strerror}. Choose another place with --runs-dir."
                ) from None
        raise TraceForgeError(f"No free run id for {name} in {runs_dir}.")

    @classmethod
    def open(cls, runs_dir: Path, run_id: str = "latest", having: Sequence[str] = ()) -> Run:
        """The run with that id; for "latest" the newest that has the stages `having`, or the newest where none has.

        Raises TraceForgeError naming the runs that are there.
        """
        runs = list_runs(runs_dir)
        if not runs:
            raise TraceForgeError(
                f"There are no runs in {runs_dir}. Start one with `traceforge run`, or name --runs-dir."
            )
        if run_id == "latest":
            whole = (run for run in reversed(runs) if all(run.result(stage) for stage in having))
            return next(whole, runs[-1])
        for run in runs:
            if run.run_id == run_id:
                return run
        known = ", ".join(run.run_id for run in runs[-10:])
        raise TraceForgeError(f"There is no run {run_id!r} in {runs_dir}. Newest runs: {known}.")

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
        except TraceForgeError:
            return True
        except OSError:  # a run on a read-only disk: nobody can be at work there
            return False

    def result(self, stage: str) -> StageResult | None:
        """The finished stage, or None where it is not there, or an output is missing or of another size."""
        folder = self.stage_dir(stage)
        try:
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            for name, output in manifest["outputs"].items():
                if (folder / name).stat().st_size != output["bytes"]:
                    return None
            figures, seconds = dict(manifest["figures"]), float(manifest["seconds"])
            return StageResult(stage, folder, str(manifest["key"]), figures, seconds)
        except NOT_OURS:
            return None

    def failure(self, stage: str) -> str | None:
        """Why the last attempt at this stage failed, or None."""
        try:
            failure = json.loads((self.partial_dir(stage) / "failure.json").read_text(encoding="utf-8"))
            return str(failure["message"])
        except NOT_OURS:
            return None

    def save_config(self, config: Mapping[str, Any]) -> None:
        write_json(self.path / "config.json", config)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process. Raises TraceForgeError where another process has it."""
        with (self.path / ".lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise TraceForgeError(
                    f"The run {self.run_id} is being worked on by process {file.read() or '?'}. "
                    "Wait for it, or start a new run."
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield


def check_runs_dir(runs_dir: Path) -> None:
    """Try whether a run could be made there; nothing is left behind. Raises TraceForgeError where it could not."""
    there = next(folder for folder in (runs_dir, *runs_dir.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".try-", dir=there):
            pass
    except OSError as error:
        if disk_is_full(error):
            raise
        raise TraceForgeError(
            f"Cannot write to the folder of runs {runs_dir}: {error.strerror}. Choose another place with --runs-dir."
        ) from None


def run_folder_of(out_dir: Path) -> Path:
    """`runs/X` for whatever works below `runs/X/.partial`; elsewhere that folder itself."""
    for folder in out_dir.parents:
        if folder.name == ".partial":
            return folder.parent
    return out_dir


def list_runs(runs_dir: Path) -> list[Run]:
    """Every run in the folder, oldest first."""
    if not runs_dir.is_dir():
        return []
    folders = (path for path in runs_dir.iterdir() if not path.name.startswith("."))
    runs = [Run(path.resolve()) for path in folders if (path / "config.json").is_file()]
    return sorted(runs, key=lambda run: (run.path.joinpath("config.json").stat().st_mtime, run.run_id))


def run_stage(
    run: Run,
    stage: str,
    config: Mapping[str, Any],
    inputs: Inputs,
    work: Callable[[Path], Figures],
    *,
    refresh: bool = False,
    resumable: bool = False,
) -> StageResult:
    """Do a stage's work unless a result with the same key is there, and commit it whole.

    `work` gets an empty folder to fill and returns the figures. A `resumable` stage finds its folder as its last failed
    attempt with the same key left it. `refresh` does the work again whatever is there. Whatever `work` raises passes
    through, after its message has been kept in `failure.json`; a full disk becomes a TraceForgeError.
    """
    key = stage_key(stage, config, inputs)
    if not refresh and (found := _find_result(run, stage, key)):
        return found

    partial = run.partial_dir(stage)
    if not (resumable and not refresh and _partial_key(partial) == key):
        shutil.rmtree(partial, ignore_errors=True)
    started = datetime.now(UTC)
    clock = time.monotonic()
    seconds = 0.0
    try:
        partial.mkdir(parents=True, exist_ok=True)
        (partial / "failure.json").unlink(missing_ok=True)
        forget_progress(partial)
        (partial / "key").write_text(key, encoding="utf-8")
        figures = work(partial)
        (partial / "key").unlink()
        forget_progress(partial)
        seconds = round(time.monotonic() - clock, 3)
        share_files(partial)
        manifest = {
            "stage": stage,
            "key": key,
            "config": config,
            "inputs": {name: {"key": result.key} for name, result in inputs.stages.items()} | dict(inputs.outside),
            "outputs": hash_files(partial),
            "figures": figures,
            "versions": installed_versions(),
            "device": device_name(),
            "started": started.isoformat(timespec="seconds"),
            "seconds": seconds,
        }
        write_json(partial / "manifest.json", manifest)
    except BaseException as error:
        _keep_failure(partial, error)
        if disk_is_full(error):
            raise TraceForgeError(
                f"The disk is full: stage {stage} could not write to {partial}. Free some space (old runs lie in "
                f"{run.path.parent}) and run it again; finished stages are kept. {page('disk-full')}"
            ) from error
        raise
    final = run.stage_dir(stage)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    return StageResult(stage, final, key, json.loads(json.dumps(figures)), seconds)


def disk_is_full(error: BaseException) -> bool:
    """Whether an error says that the disk is full. safetensors and torch have errors of their own for that."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(sign in str(error) for sign in ("No space left on device", "StorageFull", "Disk quota exceeded"))


def stage_key(stage: str, config: Mapping[str, Any], inputs: Inputs) -> str:
    """The hash that decides whether two results are the same: stage, config, inputs' keys, this library's source."""
    parts = {
        "stage": stage,
        "config": config,
        "inputs": {name: result.key for name, result in inputs.stages.items()},
        "outside": dict(inputs.outside),
        "source": source_hash(),
        "versions": installed_versions(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


@cache
def source_hash() -> str:
    """Hash of this package's own Python source, presets and templates: other code, other results."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for path in sorted(root.rglob("*")):
        if path.suffix in {".py", ".jinja"}:
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def installed_versions() -> dict[str, str]:
    """Versions of the libraries that results depend on, and Python's."""
    versions = {"python": platform.python_version()}
    for name in RECORDED_VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def device_name() -> str:
    """The GPUs if a CUDA torch is already loaded in this process, else the CPU. Never imports torch by itself."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def hash_files(folder: Path) -> dict[str, dict[str, Any]]:
    """sha256 and size of every file below a folder, by relative path."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            hashes[path.relative_to(folder).as_posix()] = {"sha256": digest, "bytes": path.stat().st_size}
    return hashes


def share_files(folder: Path) -> None:
    """Give every file the permissions that a new file gets here: some libraries write files that only their owner can
    read, and a model server or a colleague runs as somebody else."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o111 | 0o666 & ~umask)


def fingerprint_tree(path: Path) -> str:
    """Hash of the names, sizes and modification times below a path: cheap enough for a corpus of any size."""
    digest = hashlib.sha256()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        try:
            stat = file.stat()
        except OSError:  # a file removed or unreadable meanwhile: reading it will say so
            continue
        name = file.relative_to(path).as_posix() if path.is_dir() else file.name
        digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def read_figures(stage_dir: Path) -> Figures:
    """The figures in a finished stage's manifest; empty where there is no manifest."""
    try:
        content: Figures = json.loads((stage_dir / "manifest.json").read_text(encoding="utf-8"))["figures"]
        return content
    except (OSError, ValueError, KeyError):
        return {}


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it."""
    scratch = path.with_name(path.name + ".tmp")
    with scratch.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False, default=str)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def _find_result(run: Run, stage: str, key: str) -> StageResult | None:
    own = run.result(stage)
    if own and own.key == key:
        return StageResult(stage, own.path, key, own.figures, own.seconds, reused=True)
    for other in reversed(list_runs(run.path.parent)):
        there = other.result(stage) if other.path != run.path else None
        if there and there.key == key:
            _link_tree(there.path, run, stage)
            return StageResult(stage, run.stage_dir(stage), key, there.figures, there.seconds, reused=True)
    return None


def _link_tree(source: Path, run: Run, stage: str) -> None:
    """Bring another run's finished stage into this one: hard links where the file system has them, else copies."""

    def link(src: str, dst: str) -> None:
        try:
            os.link(src, dst)
        except OSError:
            shutil.copy2(src, dst)

    partial = run.partial_dir(stage)
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, partial, copy_function=link)
    final = run.stage_dir(stage)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)


def _partial_key(partial: Path) -> str | None:
    try:
        return (partial / "key").read_text(encoding="utf-8")
    except OSError:
        return None


def _keep_failure(partial: Path, error: BaseException) -> None:
    message = str(error) or type(error).__name__
    with contextlib.suppress(OSError):  # the disk may be full; the error itself still reaches the caller
        write_json(partial / "failure.json", {"error": type(error).__name__, "message": message})
