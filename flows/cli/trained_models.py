"""What a run has trained: eval, predict, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.answers import answer
from flows.cli.options import TRAINED, AnyRun, AsJson, Assignments, RunsDir
from traceforge_core.errors import TraceForgeError


def evaluate_adapters(
    run: AnyRun = "latest",
    adapters: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="[NAME=]DIR", help="An adapter; default: all of the run. May be repeated."),
    ] = None,
    datasets: Annotated[
        Path | None,
        typer.Option("--datasets", metavar="DIR", help="A datasets folder with held-out rows; default: the run's."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Keep report and plot in this folder.")
    ] = None,
    assignments: Assignments = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Measure base model and adapters on held-out pairs and next actions."""
    from flows.cli.live import at_work
    from flows.cli.terminal import as_text
    from traceforge_core.config import lay_over
    from traceforge_core.evaluation.evaluate import evaluate_adapters as evaluate
    from traceforge_core.evaluation.evaluate import named_adapters
    from traceforge_core.export.trained import open_trained
    from traceforge_core.processes.scratch import scratch_folder
    from traceforge_core.runs import Run

    strange = out is not None and out.exists() and not (out / "evaluation.json").is_file()
    if out is not None and strange and (not out.is_dir() or any(out.iterdir())):
        raise TraceForgeError(f"{out} is there and is no earlier evaluation, so it is left alone. Name another --out.")
    trained = open_trained(Run.open(runs_dir, run, having=TRAINED))
    chosen = named_adapters(adapters) if adapters else trained.adapters
    config = lay_over(trained.config, assignments=assignments)
    with scratch_folder("eval") as scratch:
        folder = out or scratch
        with at_work("evaluate", folder, bars=not as_json):
            figures = evaluate(config, trained.model_dir, datasets or trained.datasets, chosen, folder)
        text = (folder / "evaluation.md").read_text(encoding="utf-8")
    shown = as_text(text.partition("![")[0]) + (f"\n\nReport and plot: {out}" if out else "")
    left_out = {} if adapters else trained.left_out
    answer(figures | {"path": str(out.resolve()) if out else None, "left_out": left_out}, as_json, shown)


def predict(
    run: AnyRun = "latest",
    sample: Annotated[int, typer.Option("--sample", min=1, metavar="COUNT", help="How many held-out histories.")] = 1,
    tokens: Annotated[int, typer.Option("--tokens", min=1, metavar="COUNT", help="Longest action, in tokens.")] = 128,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show what base and tuned models would do next on held-out histories, beside what was recorded."""
    from flows.cli.live import at_work
    from flows.cli.terminal import columns
    from traceforge_core.evaluation.predict import predict as predict_actions
    from traceforge_core.evaluation.predict import render
    from traceforge_core.export.trained import open_trained
    from traceforge_core.runs import Run

    trained = open_trained(Run.open(runs_dir, run, having=TRAINED))
    with at_work("writing next actions", bars=not as_json):
        answers = predict_actions(
            trained.config, trained.model_dir, trained.datasets, trained.adapters, sample=sample, new_tokens=tokens
        )
    answer({"predictions": answers, "left_out": trained.left_out}, as_json, render(answers, columns()))


def export(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder to write to; an earlier export there is replaced.")
    ],
    run: AnyRun = "latest",
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage", metavar="STAGE", help="Whose adapter: sft, oracle, ...; default: the last kind of training."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="DTYPE", help="bfloat16 or float32; default: what the run's model is computed in."
        ),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Merge a trained adapter into its base, check its logits, and save it for transformers and vLLM."""
    from flows.cli.live import at_work
    from traceforge_core.export.merge import DTYPES, export_run
    from traceforge_core.runs import Run

    if dtype not in (None, *DTYPES):
        raise TraceForgeError(f"--dtype is {dtype!r}; it must be {' or '.join(DTYPES)}.")
    found = Run.open(runs_dir, run, having=TRAINED)
    with at_work("merging and checking", bars=not as_json):
        figures = export_run(found, out, stage and stage.replace("-", "_"), dtype)
    answer(
        figures,
        as_json,
        f"{figures['path']}: {figures['stage']} merged in {figures['dtype']}, {figures['bytes'] / 2**20:,.1f} MiB. "
        f"Logits: {figures['verdict']} (differ by {figures['difference']:.2g}, rounding {figures['rounding']:.2g}, "
        f"adapter {figures['adapter_effect']:.2g}, RMS).",
    )
