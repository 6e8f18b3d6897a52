"""Whether stages can do their work, looked at before any of it begins, in milliseconds: names, paths, GPUs.

check_start(["ingest", "model", "datasets"], config)
"""

from __future__ import annotations

from collections.abc import Sequence

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.paths import written
from traceforge_core.runs import Run
from traceforge_core.stages import IN_WORKERS, missing, needs_of


def check_start(names: Sequence[str], config: RunConfig, run: Run | None = None) -> None:
    """Look whether these stages can do their work: what they need of other stages (from `run`, or from each other), the
    files and folders they will read, the GPUs they will ask for. In milliseconds, before a server is started, a model
    downloaded or a corpus read. A hub id is not asked for.

    Raises TraceForgeError naming the stage or the field.
    """
    for name in names:
        for needed in needs_of(name, config):
            if needed not in names and (run is None or run.result(needed) is None):
                raise missing(name, needed, run)
    _check_paths(names, config)
    if any(name in IN_WORKERS for name in names):
        from traceforge_core.training.stages import require_machine

        require_machine(names, config)


def check_trainings(names: Sequence[str], config: RunConfig, run: Run) -> None:
    """Look, once model and datasets are there, whether every training among these stages can compute the model and hold
    its longest sample. Nothing is loaded.

    Raises TraceForgeError, naming what would help.
    """
    model, datasets = run.result("model"), run.result("datasets")
    if model is not None and datasets is not None:
        from traceforge_core.training.stages import require_trainings

        require_trainings(names, config, model.path, datasets.path)


def _check_paths(names: Sequence[str], config: RunConfig) -> None:
    preference = config.datasets.preference
    if "ingest" in names:
        from traceforge_core.trajectories.ingest import corpus_folder

        corpus_folder(config.ingest.path)
        for path in config.ingest.outcomes:
            _must_be_there(path, "ingest.outcomes", "Mend or remove the entry.")
    if "model" in names:
        from traceforge_core.modeling.source import check_model_path

        check_model_path(config.model)
    if "datasets" in names and "given" in preference.miners and preference.given:
        _must_be_there(preference.given, "datasets.preference.given", "Name a JSONL file of ready pairs.")
    if "datasets" in names and "sampled" in preference.miners and preference.sampled.adapter:
        adapter = preference.sampled.adapter
        _must_be_there(adapter, "datasets.preference.sampled.adapter", "Name an adapter's folder, or leave it empty.")


def _must_be_there(path: str, field: str, advice: str) -> None:
    if not written(path).exists():
        raise TraceForgeError(f"There is no file or folder {written(path)} ({field}). {advice}")
