"""Running the pipeline, and looking after runs: run, show, runs, stop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flows.cli.answers import Stopped, Unfinished, answer, tell
from flows.cli.endings import unexpected
from flows.cli.options import AnyRun, AsJson, Assignments, ConfigFile, Preset, RunsDir, known_runs, known_stages
from flows.cli.terminal import columns
from traceforge_core.errors import TraceForgeError


def run(
    preset: Preset = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    stages: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            autocompletion=known_stages,
            help="Only these, separated by commas (see `traceforge stages`).",
        ),
    ] = None,
    run: Annotated[
        str,
        typer.Option(
            "--run", metavar="RUN", autocompletion=known_runs, help="new, latest, or the id of a run to go on with."
        ),
    ] = "new",
    runs_dir: RunsDir = Path("runs"),
    refresh: Annotated[bool, typer.Option("--refresh", help="Do the work again even where a result is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the pipeline, or some of its stages, with an embedded Prefect (or the one that PREFECT_API_URL names).

    A run that is gone on with keeps its own configuration, unless --preset or --config is given.
    """
    from flows.cli.live import at_work
    from flows.embedded import embedded_api
    from flows.session import begin, ordered, saved_config
    from flows.summary import render, summarise
    from traceforge_core.config import lay_over, load_config
    from traceforge_core.runs import Run, check_runs_dir
    from traceforge_core.start_check import check_start
    from traceforge_core.training.trackers import require_trackers

    earlier = None if run == "new" else Run.open(runs_dir, run)
    if earlier is not None and preset is None and config is None:
        effective = lay_over(saved_config(earlier), assignments=assignments)
    else:
        effective = load_config(preset, config, assignments)
    effective = lay_over(effective)  # every field counts as given from here on
    names = ordered(None if stages is None else stages.split(","), effective)
    require_trackers(effective)
    check_start(names, effective, earlier)  # what is not there should be told at once and leave no run behind
    check_runs_dir(runs_dir)
    here: Run | None = None
    try:
        with at_work("starting Prefect's server", bars=not as_json) as view, embedded_api():
            from flows.pipeline import traceforge

            here, _ = begin(runs_dir, run, effective)
            tell(f"Run {here.run_id} in {here.path}")
            view.follow(here)
            place: dict[str, Any] = {"run": here.run_id, "runs_dir": str(here.path.parent)}
            traceforge(config=effective, stages=names, refresh=refresh, **place)
    except (Exception, Stopped) as error:
        if here is None:
            raise
        raise _unfinished(error, here) from error
    summary = summarise(here)
    answer(summary, as_json, render(summary, columns()))


def _unfinished(error: Exception | Stopped, run: Any) -> Unfinished:
    from flows.embedded import ServerEnded
    from flows.summary import render, summarise

    if isinstance(error, Stopped):
        message, status = f"Stopped by {error}. Go on with: {run.command()}", 128 + error.number
    elif type(error).__name__ == "CancelledRun":  # what a flow raises that ends as Cancelled: a STOP file was there
        message, status = f"{error} Go on with: {run.command()}", 1
    elif isinstance(error, ServerEnded):
        told = "The run was stopped, and nothing that is finished is lost."
        message, status = f"{error} {told} Go on with: {run.command()}", 1
    elif isinstance(error, TraceForgeError):
        message, status = str(error), 2 if type(error).__name__ == "ParityFailed" else 1
    else:
        message, status = unexpected(error, run.path), 1
    summary = summarise(run)
    told_below = [stage | {"message": ""} if stage.get("message") == message else stage for stage in summary["stages"]]
    return Unfinished(message, status, summary, f"\n{render(summary | {'stages': told_below}, columns())}\n")


def show(
    run: AnyRun = "latest",
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show what a run holds: each stage with its figures, and the verdict."""
    from flows.summary import render, summarise
    from traceforge_core.runs import Run

    summary = summarise(Run.open(runs_dir, run))
    answer(summary, as_json, render(summary, columns()))


def runs(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", autocompletion=known_runs, help="Two runs or more: say where they differ."),
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Say which runs may go; with --yes, remove them.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option("--older-than", min=0, metavar="DAYS", help="Prune runs last used more days ago than this."),
    ] = None,
    total_gib: Annotated[
        float | None,
        typer.Option(
            "--total-gib", min=0, metavar="GIB", help="Prune the oldest until all runs take no more than this."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Really remove what --prune names.")] = False,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List runs with age and size; compare some; remove old ones, never the latest good ones."""
    from flows.cli.run_folders import compared, listed, pruned

    names = names or []
    if prune and names:
        raise TraceForgeError("--prune chooses the runs itself, by age and size. Leave the names out.")
    if not prune and (yes or older_than is not None or total_gib is not None):
        raise TraceForgeError("--older-than, --total-gib and --yes are for --prune. Add it.")
    if len(names) == 1:
        raise TraceForgeError(
            f"Name another run to compare {names[0]} with, or see it with: traceforge show {names[0]}"
        )
    if prune:
        value, text = pruned(runs_dir, older_than, total_gib, yes)
    else:
        value, text = compared(runs_dir, names) if names else listed(runs_dir)
    answer(value, as_json, text)


def stop(
    run: AnyRun = "latest",
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Have a run stop, whoever works on it: training after the step at work, with a checkpoint to go on from."""
    from traceforge_core.runs import Run

    found = Run.open(runs_dir, run)
    if not found.is_at_work():
        raise TraceForgeError(f"Nobody works on run {found.run_id} ({found.path}), so there is nothing to stop.")
    found.stop_file.touch()
    told = "Training ends after the step at work; any other stage is finished, and no other is begun."
    answer({"run_id": found.run_id, "path": str(found.stop_file)}, as_json, f"{found.stop_file} is made. {told}")
