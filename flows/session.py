"""One call of the pipeline on one run: which run, with which configuration, and what it did, kept in `invocation.json`.

run, config = begin(Path("runs"), "new")           # or "latest", or a run's id
session = Session(run, ["ingest", "model"])
session.note("ingest", "completed", reused=False)
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from traceforge_core.config import RunConfig, lay_over, load_config, validate_config
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import NOT_OURS, Run, list_runs, write_json
from traceforge_core.stages import STAGES, pipeline

FILE_NAME = "invocation.json"
StageStatus = Literal["running", "completed", "failed", "interrupted"]


def begin(
    runs_dir: Path, run: str, config: RunConfig | None = None, flow_run_id: str | None = None
) -> tuple[Run, RunConfig]:
    """The run to work on and its effective configuration, which is saved in the run.

    `run`: "new", "latest" or an id. The fields given in `config` are laid over the run's own configuration, for a new
    run over the default preset. A flow run that is started again (a retry) goes on with the run it made before.
    Raises TraceForgeError where there is no such run, it cannot be made, or another process is at work on it.
    """
    earlier = _run_of(runs_dir, flow_run_id) if run == "new" and flow_run_id else None
    if run == "new" and earlier is None:
        base, here = load_config(), None
    else:
        here = earlier or Run.open(runs_dir, run)
        base = saved_config(here)
    effective = lay_over(base, config)
    found, here = here, here or Run.create(runs_dir)
    try:
        with here.lock():  # another process at work on it must keep the configuration it started with
            here.save_config(effective.model_dump(mode="json"))
    except BaseException:
        if found is None:  # a folder without a configuration is no run
            shutil.rmtree(here.path, ignore_errors=True)
        raise
    return here, effective


def saved_config(run: Run) -> RunConfig:
    """The configuration a run was last worked on with. Raises TraceForgeError where it cannot be read."""
    try:
        tree = json.loads((run.path / "config.json").read_text(encoding="utf-8"))
    except NOT_OURS as error:
        raise TraceForgeError(
            f"The configuration of run {run.run_id} cannot be read ({run.path / 'config.json'}: {error}). "
            "Give one with --preset or --config, or start a new run."
        ) from None
    return validate_config(tree)


def ordered(names: Sequence[str] | None, config: RunConfig) -> list[str]:
    """Stage names in the order of the pipeline; None: those of a full run. Hyphens count as underscores.

    Raises TraceForgeError for a name that is no stage.
    """
    if names is None:
        return pipeline(config)
    wanted = {name.strip().replace("-", "_") for name in names} - {""}
    if unknown := wanted - set(STAGES):
        raise TraceForgeError(f"No such stage: {', '.join(sorted(unknown))}. Stages: {', '.join(STAGES)}.")
    if not wanted:
        raise TraceForgeError(f"No stage is named. Stages: {', '.join(STAGES)}.")
    return [name for name in STAGES if name in wanted]


class Session:
    """What one call does to a run, written down after every change."""

    def __init__(self, run: Run, stages: Sequence[str], flow_run_id: str | None = None) -> None:
        self._path = run.path / FILE_NAME
        self._stages: dict[str, dict[str, Any]] = {}
        self._call = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "flow_run_id": flow_run_id,
            "asked_for": list(stages),
            "stages": self._stages,
        }
        self._write()

    def note(self, stage: str, status: StageStatus, *, reused: bool = False, message: str | None = None) -> None:
        """Where a stage stands now. `message`: why it failed."""
        self._stages[stage] = {"status": status, "reused": reused} | ({"message": message} if message else {})
        with contextlib.suppress(OSError):  # a full disk: what failed because of it is told by its own error
            self._write()

    def _write(self) -> None:
        write_json(self._path, self._call)


def last_session(run: Run) -> dict[str, Any]:
    """What the last call on a run wrote down; {} where there was none, or nothing of that shape."""
    try:
        content: dict[str, Any] = json.loads((run.path / FILE_NAME).read_text(encoding="utf-8"))
        stages = {str(name): dict(noted) for name, noted in content.get("stages", {}).items()}
        return content | {"stages": stages}
    except NOT_OURS:
        return {}


def _run_of(runs_dir: Path, flow_run_id: str) -> Run | None:
    for run in reversed(list_runs(runs_dir)):
        if last_session(run).get("flow_run_id") == flow_run_id:
            return run
    return None
