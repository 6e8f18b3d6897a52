"""One stage's work, done unless its result is there, and committed whole."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from traceforge_core.errors import TraceForgeError
from traceforge_core.runs.files import disk_is_full, full_disk, hash_files, share_files, write_json
from traceforge_core.runs.folder import Figures, Run, StageResult, list_runs
from traceforge_core.runs.progress import forget_progress
from traceforge_core.runs.versions import device_name, installed_versions, source_hash

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a stage works from: finished stages by name. `outside` are hashes of things outside the run, by name."""

    stages: Mapping[str, StageResult] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)


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
    through, after its message has been kept in `failure.json`; a full disk, and a run folder that is gone or cannot be
    written to, become a TraceForgeError; a file or link in the place of the stage's folder does before any work.
    """
    key = stage_key(stage, config, inputs)
    own = run.result(stage)
    if not refresh and own and own.key == key:
        return replace(own, reused=True)
    _require_places(run, stage)
    if not refresh and (lent := _borrow(run, stage, key)):
        return lent

    partial = run.partial_dir(stage)
    left = _partial_key(partial)
    if not (resumable and not refresh and left == key):
        if resumable and not refresh and left is not None:
            logger.warning(
                "Stage %s begins anew: its last attempt, which did not finish, had another configuration, input, code "
                "or version of a package, so there is no going on from it.",
                stage,
            )
        shutil.rmtree(partial, ignore_errors=True)
    started = datetime.now(UTC)
    clock = time.monotonic()
    seconds, is_at_work = 0.0, False
    final = run.stage_dir(stage)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        (partial / "failure.json").unlink(missing_ok=True)
        forget_progress(partial)
        (partial / "key").write_text(key, encoding="utf-8")
        is_at_work = True
        figures = work(partial)
        (partial / "key").unlink()
        is_at_work = False
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
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
    except BaseException as error:
        # Whoever makes the folders above a file that he writes brings the run's back, without what was in it.
        if isinstance(error, OSError) and (not run.path.is_dir() or (is_at_work and not (partial / "key").exists())):
            raise run.gone(f"while stage {stage} worked in it") from error
        if isinstance(error, OSError) and not os.access(run.path, os.W_OK):
            raise run.not_written(error) from error
        _keep_failure(partial, error)
        if disk_is_full(error):
            then = f"(old runs lie in {run.path.parent}) and run it again; finished stages are kept"
            raise full_disk(f"stage {stage} could not write to {partial}", then) from error
        raise
    return StageResult(stage, final, key, json.loads(json.dumps(figures)), seconds)


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


def _require_places(run: Run, stage: str) -> None:
    """Raise TraceForgeError where a stage could not work, or its work not be put, since something else is there."""
    for place in (run.stage_dir(stage), run.partial_dir(stage).parent, run.partial_dir(stage)):
        if os.path.lexists(place) and (place.is_symlink() or not place.is_dir()):
            what = "a link" if place.is_symlink() else "a file"
            raise TraceForgeError(
                f"Stage {stage} needs the folder {place}, but {what} is in its place, which TraceForge did not make. "
                "Move it away (or remove it) and run the stage again."
            )


def _borrow(run: Run, stage: str, key: str) -> StageResult | None:
    """The same stage of another run, brought into this one."""
    for other in reversed(list_runs(run.path.parent)):
        there = other.result(stage) if other.path != run.path else None
        if there and there.key == key:
            try:
                _link_tree(there.path, run, stage)
            except OSError:  # pruned this very moment: the work is done again
                continue
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
