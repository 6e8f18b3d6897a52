"""Reading trajectories, and looking at what they gave: ingest, data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.answers import Unfinished, answer
from flows.cli.options import AnyRun, AsJson, RunsDir
from traceforge_core.errors import TraceForgeError


def ingest(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Folder or file with trajectories, or `samples`.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder to write to; an earlier ingest there is replaced.")
    ],
    outcomes: Annotated[
        list[str] | None,
        typer.Option("--outcomes", metavar="PATH", help="More outcome files, or folders of them. May be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read trajectories into one uniform corpus; what cannot be read is set aside with its reason."""
    from flows.cli.live import at_work
    from traceforge_core.config import load_config
    from traceforge_core.trajectories.ingest import ingest as read_all
    from traceforge_core.trajectories.ingest import refuse_nothing_read

    if out.exists() and not (out / "report.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise TraceForgeError(f"{out} is there and is no earlier ingest, so it is left alone. Name another --out.")
    config = load_config()
    config.ingest.path = path
    config.ingest.outcomes = outcomes or []
    scratch = out.with_name(f".{out.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir(parents=True)
        with at_work("ingest", scratch, bars=not as_json):
            figures = read_all(config, {}, scratch)
        shutil.rmtree(out, ignore_errors=True)
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    from flows.summary import key_figures

    figures |= {"path": str(out.resolve())}
    try:
        refuse_nothing_read(figures, out)
    except TraceForgeError as error:
        raise Unfinished(str(error), 1, figures, key_figures("ingest", figures)) from None
    where = f"Written to {out}"
    if figures["quarantined"]:
        where += f"; what was set aside, and why: {out / 'quarantine.jsonl'}"
    answer(figures, as_json, f"{key_figures('ingest', figures)}\n{where}")


def data(
    run: AnyRun = "latest",
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The HTML file to write.")] = Path("data.html"),
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show what a run's data is made of, and write a page that shows samples as the model sees them."""
    from flows.cli.live import at_work
    from flows.cli.terminal import as_text
    from traceforge_core.datasets.page import write_data_page
    from traceforge_core.runs import Run

    found = Run.open(runs_dir, run, having=("ingest", "model", "datasets"))
    datasets = found.result("datasets")
    if datasets is None:
        raise TraceForgeError(
            f"Run {found.run_id} has no finished stage datasets. Finish it with: "
            + found.command("ingest", "model", "datasets")
        )
    with at_work("writing the page", bars=not as_json):
        page = write_data_page(found.path, out)
    report = (datasets.path / "report.md").read_text(encoding="utf-8")
    answer(
        {"path": str(page.resolve()), "datasets": datasets.figures},
        as_json,
        f"{as_text(report)}\n\nThe same with samples, token by token: {page}",
    )
