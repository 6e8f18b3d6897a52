"""Every command of `traceforge`, with the line that the list of commands shows for it."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from flows.cli import corpus, preparing, running, trained_models

app = typer.Typer(
    name="traceforge",
    help="Turns the trajectories that coding agents leave behind into a better coding model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# In the order of the help page, each with a line that fits there.
for command, name, line in (
    (running.run, "run", "Run the pipeline, or some of its stages."),
    (corpus.ingest, "ingest", "Read trajectories, without the rest."),
    (running.show, "show", "Show what a run holds, and its verdict."),
    (running.runs, "runs", "List runs, compare some, remove old ones."),
    (running.stop, "stop", "Have a run stop, with a checkpoint."),
    (corpus.data, "data", "Show what the model will learn from."),
    (preparing.init, "init", "Write a configuration for your data."),
    (preparing.show_config, "config", "Print every setting with its meaning."),
    (preparing.stages, "stages", "List the stages and what each needs."),
    (preparing.doctor, "doctor", "Look this machine over; say what suits."),
    (trained_models.evaluate_adapters, "eval", "Measure base model and adapters."),
    (trained_models.predict, "predict", "Show their next actions, side by side."),
    (trained_models.export, "export", "Merge an adapter, for transformers and vLLM."),
    (preparing.plan, "plan", "Say beforehand what fits a GPU."),
):
    app.command(name=name, short_help=line)(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"traceforge {version('traceforge-core')}")
        raise typer.Exit


@app.callback()
def _every_command(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
