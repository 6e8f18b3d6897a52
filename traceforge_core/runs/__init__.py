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

from traceforge_core.runs.files import (
    disk_is_full,
    fingerprint_tree,
    full_disk,
    not_written,
    share_files,
    write_json,
    write_text,
)
from traceforge_core.runs.folder import (
    NOT_OURS,
    Figures,
    Run,
    StageResult,
    check_runs_dir,
    list_runs,
    read_figures,
    run_folder_of,
)
from traceforge_core.runs.stage import Inputs, run_stage, stage_key
from traceforge_core.runs.versions import installed_versions, source_hash

__all__ = [
    "NOT_OURS",
    "Figures",
    "Inputs",
    "Run",
    "StageResult",
    "check_runs_dir",
    "disk_is_full",
    "fingerprint_tree",
    "full_disk",
    "installed_versions",
    "list_runs",
    "not_written",
    "read_figures",
    "run_folder_of",
    "run_stage",
    "share_files",
    "source_hash",
    "stage_key",
    "write_json",
    "write_text",
]
