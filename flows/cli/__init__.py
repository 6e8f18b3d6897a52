"""The command `traceforge`: a thin front on the flow and on plain functions, for people without a server.

    traceforge run --set sft.max_steps=20          traceforge ingest ~/logs --out corpus          traceforge show latest

Exit status: 0 done, 1 not done (the message says what to do), 2 done, but a strategy does not agree with the oracle,
130 stopped by Ctrl-C. With --json stdout is exactly one JSON object; everything else goes to stderr.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from flows.cli import corpus, preparing, running, trained_models
from flows.cli.endings import run_to_the_end

app = typer.Typer(
    name="traceforge",
    help="Turns the trajectories that coding agents leave behind into a better coding model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# In the order of the help page.
for command, name in (
    (running.run, "run"),
    (corpus.ingest, "ingest"),
    (running.show, "show"),
    (running.runs, "runs"),
    (running.stop, "stop"),
    (corpus.data, "data"),
    (preparing.init, "init"),
    (preparing.show_config, "config"),
    (preparing.stages, "stages"),
    (preparing.doctor, "doctor"),
    (trained_models.evaluate_adapters, "eval"),
    (trained_models.predict, "predict"),
    (trained_models.export, "export"),
    (preparing.plan, "plan"),
):
    app.command(name=name)(command)


def main() -> NoReturn:
    """The command `traceforge`."""
    sys.exit(run_to_the_end(app))
