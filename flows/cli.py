"""The command `traceforge`: a thin front on the flow and on plain functions, for people without a server.

    traceforge run --set sft.max_steps=20          traceforge ingest ~/logs --out corpus          traceforge show latest

Exit status: 0 done, 1 not done (the message says what to do), 2 done, but a strategy does not agree with the oracle,
130 stopped by Ctrl-C. With --json stdout is exactly one JSON object; everything else goes to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from traceforge_core.errors import TraceForgeError

app = typer.Typer(
    name="traceforge",
    help="Turns the trajectories that coding agents leave behind into a better coding model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# typer's own base of "you typed something wrong"; which package it comes from differs between typer releases.
UsageError: type[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
# Of which "latest" is the newest that has them, for commands that work on what was trained.
TRAINED = ("model", "datasets", "sft")
SHOWN_LOGGERS = ("traceforge_core", "tasks", "flows")
STEP_LINE = re.compile(r"\[\d+\] step \d+/\d+ ")

AsJson = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]
RunsDir = Annotated[Path, typer.Option("--runs-dir", help="The folder in which runs lie.")]
Preset = Annotated[
    str | None,
    typer.Option("--preset", help="Start from this preset; default: the one that --config names, else tiny-cpu."),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file with what differs from the preset.")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", help="section.field=value, such as sft.max_steps=20. May be repeated.")
]


class Stopped(BaseException):
    """A signal asked this command to end. Not an Exception, so that nothing on the way mistakes it for an error."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Unfinished(Exception):
    """Work that did not end well, with what is there of it: as JSON, and as text for a terminal."""

    def __init__(self, message: str, status: int, answer: dict[str, Any], text: str) -> None:
        super().__init__(message)
        self.status = status
        self.answer = answer
        self.text = text


@app.command()
def run(
    preset: Preset = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    stages: Annotated[
        str | None, typer.Option(help="Only these, separated by commas (see `traceforge stages`).")
    ] = None,
    run: Annotated[str, typer.Option("--run", help="new, latest, or the id of a run to go on with.")] = "new",
    runs_dir: RunsDir = Path("runs"),
    refresh: Annotated[bool, typer.Option("--refresh", help="Do the work again even where a result is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the pipeline, or some of its stages, with an embedded Prefect (or the one that PREFECT_API_URL names).

    A run that is gone on with keeps its own configuration, unless --preset or --config is given.
    """
    from flows.embedded import embedded_api
    from flows.live import at_work
    from flows.session import begin, ordered, saved_config
    from flows.summary import render, summarise
    from traceforge_core.config import lay_over, load_config
    from traceforge_core.runs import Run, check_runs_dir
    from traceforge_core.stages import check_paths
    from traceforge_core.training.trackers import require_trackers

    if run != "new" and preset is None and config is None:
        effective = lay_over(saved_config(Run.open(runs_dir, run)), assignments=assignments)
    else:
        effective = load_config(preset, config, assignments)
    effective = lay_over(effective)  # every field counts as given from here on
    names = ordered(None if stages is None else stages.split(","), effective)
    require_trackers(effective)
    check_paths(names, effective)  # what is not there should be told at once and leave no run behind
    check_runs_dir(runs_dir)
    here: Run | None = None
    try:
        with at_work("starting Prefect's server", bars=not as_json) as view, embedded_api():
            from flows.pipeline import traceforge

            here, _ = begin(runs_dir, run, effective)
            _tell(f"Run {here.run_id} in {here.path}")
            view.follow(here)
            place: dict[str, Any] = {"run": here.run_id, "runs_dir": str(here.path.parent)}
            traceforge(config=effective, stages=names, refresh=refresh, **place)
    except (Exception, Stopped) as error:
        if here is None:
            raise
        raise _unfinished(error, here) from error
    summary = summarise(here)
    _answer(summary, as_json, render(summary))


def _unfinished(error: Exception | Stopped, run: Any) -> Unfinished:
    from flows.summary import render, summarise

    if isinstance(error, Stopped):
        message, status = f"Stopped by {error}. Go on with: traceforge run --run {run.run_id}", 128 + error.number
    elif type(error).__name__ == "CancelledRun":  # what a flow raises that ends as Cancelled: a STOP file was there
        message, status = f"{error} Go on with: traceforge run --run {run.run_id}", 1
    elif isinstance(error, TraceForgeError):
        message, status = str(error), 2 if type(error).__name__ == "ParityFailed" else 1
    else:
        message, status = _unexpected(error, run.path), 1
    summary = summarise(run)
    told_below = [stage | {"message": ""} if stage.get("message") == message else stage for stage in summary["stages"]]
    return Unfinished(message, status, summary, f"\n{render(summary | {'stages': told_below})}\n")


@app.command()
def ingest(
    path: Annotated[str, typer.Argument(help="Folder or file with trajectories, or `samples`.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write to; an earlier ingest there is replaced.")],
    outcomes: Annotated[
        list[str] | None, typer.Option("--outcomes", help="More outcome files, or folders of them. May be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read trajectories into one uniform corpus; what cannot be read is set aside with its reason."""
    from flows.live import at_work
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
    _answer(figures, as_json, f"{key_figures('ingest', figures)}\n{where}")


@app.command()
def show(
    run: Annotated[str, typer.Argument(help="A run's id, or latest.")] = "latest",
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show what a run holds: each stage with its figures, and the verdict."""
    from flows.summary import render, summarise
    from traceforge_core.runs import Run

    summary = summarise(Run.open(runs_dir, run))
    _answer(summary, as_json, render(summary))


@app.command()
def runs(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Two runs or more: say where they differ.")
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Say which runs may go; with --yes, remove them.")] = False,
    older_than: Annotated[
        float | None, typer.Option("--older-than", min=0, help="Prune runs last used more days ago than this.")
    ] = None,
    total_gib: Annotated[
        float | None, typer.Option("--total-gib", min=0, help="Prune the oldest until all runs take no more than this.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Really remove what --prune names.")] = False,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List runs with age and size; compare some; remove old ones, never the latest good ones."""
    from flows.runs_command import compared, listed, pruned

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
    _answer(value, as_json, text)


@app.command()
def stop(
    run: Annotated[str, typer.Argument(help="A run's id, or latest.")] = "latest",
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
    _answer({"run_id": found.run_id, "path": str(found.stop_file)}, as_json, f"{found.stop_file} is made. {told}")


@app.command()
def data(
    run: Annotated[str, typer.Argument(help="A run's id, or latest.")] = "latest",
    out: Annotated[Path, typer.Option("--out", help="The HTML file to write.")] = Path("data.html"),
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show what a run's data is made of, and write a page that shows samples as the model sees them."""
    from flows.terminal import as_text
    from traceforge_core.datasets.page import write_data_page
    from traceforge_core.runs import Run

    found = Run.open(runs_dir, run, having=("ingest", "model", "datasets"))
    datasets = found.result("datasets")
    if datasets is None:
        raise TraceForgeError(
            f"Run {found.run_id} has no finished stage datasets. Finish it with: traceforge run --run {found.run_id} "
            "--stages ingest,model,datasets"
        )
    page = write_data_page(found.path, out)
    report = (datasets.path / "report.md").read_text(encoding="utf-8")
    _answer(
        {"path": str(page.resolve()), "datasets": datasets.figures},
        as_json,
        f"{as_text(report)}\n\nThe same with samples, token by token: {page}",
    )


@app.command()
def init(
    out: Annotated[Path, typer.Option("--out", help="The YAML file to write.")] = Path("traceforge.yaml"),
    data: Annotated[
        str, typer.Option("--data", help="Folder or file with your trajectories, or `samples`.")
    ] = "samples",
    model: Annotated[
        str | None, typer.Option("--model", help="A folder, a hub id, or tiny; default: the preset's.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", help="Lie over this preset; default: what suits this machine.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a short, commented configuration for your data, model and machine, and check it."""
    from dataclasses import asdict

    from traceforge_core.initialise import initialise

    written = initialise(out, data=data, model=model, preset=preset, force=force)
    lines = [f"{written.path}: over the preset {written.preset} ({written.reason}).", *written.notes]
    _answer(asdict(written), as_json, "\n".join([*lines, f"Next: {written.command}"]))


@app.command(name="config")
def show_config(
    preset: Preset = None, config: ConfigFile = None, assignments: Assignments = None, as_json: AsJson = False
) -> None:
    """Print the effective configuration as YAML, each field with its description."""
    from flows.described import described
    from traceforge_core.config import DEFAULT_PRESET, load_config, preset_in, preset_names

    effective = load_config(preset, config, assignments)
    chosen = preset or preset_in(config) or DEFAULT_PRESET
    head = f"# Preset: {chosen}. Presets: {', '.join(preset_names())}.\n"
    _answer(effective.model_dump(mode="json"), as_json, head + described(effective))


@app.command()
def stages(as_json: AsJson = False) -> None:
    """List the stages in order, with what each needs."""
    from traceforge_core.stages import STAGES

    listed = [{"stage": stage.name, "title": stage.title, "needs": list(stage.needs)} for stage in STAGES.values()]
    lines = [f"{stage.name:<16} {stage.title:<34} needs: {', '.join(stage.needs) or '-'}" for stage in STAGES.values()]
    _answer({"stages": listed}, as_json, "\n".join(lines))


@app.command()
def doctor(runs_dir: RunsDir = Path("runs"), as_json: AsJson = False) -> None:
    """Look this machine over: what it has, what is installed, what really works, and the preset that suits.

    Exit status 1 where something will not work.
    """
    from flows.live import at_work
    from traceforge_core.doctor.examine import examine
    from traceforge_core.doctor.report import render

    with at_work("looking this machine over", bars=not as_json):
        checkup = examine(runs_dir)
    _answer(checkup.to_json(), as_json, render(checkup))
    if checkup.problems:
        raise typer.Exit(1)


@app.command(name="eval")
def evaluate_adapters(
    run: Annotated[str, typer.Argument(help="The run whose model is evaluated: its id, or latest.")] = "latest",
    adapters: Annotated[
        list[str] | None,
        typer.Option("--adapter", help="DIR or NAME=DIR of an adapter; default: all of the run. May be repeated."),
    ] = None,
    datasets: Annotated[
        Path | None, typer.Option("--datasets", help="A datasets folder with held-out rows; default: the run's.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Keep report and plot in this folder.")] = None,
    assignments: Assignments = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Measure base model and adapters on held-out pairs and next actions."""
    from flows.live import at_work
    from flows.terminal import as_text
    from traceforge_core.config import lay_over
    from traceforge_core.evaluation.evaluate import evaluate_adapters as evaluate
    from traceforge_core.evaluation.evaluate import named_adapters
    from traceforge_core.runs import Run
    from traceforge_core.scratch import scratch_folder
    from traceforge_core.trained import open_trained

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
    _answer(figures | {"path": str(out.resolve()) if out else None}, as_json, shown)


@app.command()
def predict(
    run: Annotated[str, typer.Argument(help="A run's id, or latest.")] = "latest",
    sample: Annotated[int, typer.Option("--sample", min=1, help="How many held-out histories.")] = 1,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Longest action, in tokens.")] = 128,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show what base and tuned models would do next on held-out histories, beside what was recorded."""
    from flows.live import at_work
    from traceforge_core.evaluation.predict import predict as predict_actions
    from traceforge_core.evaluation.predict import render
    from traceforge_core.runs import Run
    from traceforge_core.trained import open_trained

    trained = open_trained(Run.open(runs_dir, run, having=TRAINED))
    with at_work("writing next actions", bars=not as_json):
        answers = predict_actions(
            trained.config, trained.model_dir, trained.datasets, trained.adapters, sample=sample, new_tokens=tokens
        )
    _answer({"predictions": answers}, as_json, render(answers))


@app.command()
def export(
    out: Annotated[Path, typer.Option("--out", help="Folder to write to; an earlier export there is replaced.")],
    run: Annotated[str, typer.Argument(help="A run's id, or latest.")] = "latest",
    stage: Annotated[
        str | None, typer.Option("--stage", help="Whose adapter: sft, oracle, ...; default: the last kind of training.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="bfloat16 or float32; default: what the run's model is computed in.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Merge a trained adapter into its base, check its logits, and save it for transformers and vLLM."""
    from flows.live import at_work
    from traceforge_core.export import DTYPES, export_run
    from traceforge_core.runs import Run

    if dtype not in (None, *DTYPES):
        raise TraceForgeError(f"--dtype is {dtype!r}; it must be {' or '.join(DTYPES)}.")
    found = Run.open(runs_dir, run, having=TRAINED)
    with at_work("merging and checking", bars=not as_json):
        figures = export_run(found, out, stage and stage.replace("-", "_"), dtype)
    _answer(
        figures,
        as_json,
        f"{figures['path']}: {figures['stage']} merged in {figures['dtype']}, {figures['bytes'] / 2**20:,.1f} MiB. "
        f"Logits: {figures['verdict']} (differ by {figures['difference']:.2g}, rounding {figures['rounding']:.2g}, "
        f"adapter {figures['adapter_effect']:.2g}, RMS).",
    )


@app.command()
def plan(
    model: Annotated[str | None, typer.Argument(help="Folder, config.json or hub id; default: model.name.")] = None,
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of the prompt.")] = 77_824,
    completion: Annotated[int, typer.Option("--completion", min=1, help="Tokens of a completion.")] = 4_096,
    gpu_gib: Annotated[float, typer.Option("--gpu-gib", help="Memory of one GPU.")] = 24,
    host_gib: Annotated[float | None, typer.Option("--host-gib", help="Host memory that may be pinned.")] = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="How many GPUs.")] = 2,
    device: Annotated[str, typer.Option("--device", help="GPU whose measured rates give the time.")] = "H200",
    plot: Annotated[Path | None, typer.Option("--plot", help="Write length against memory to this PNG.")] = None,
    preset: Preset = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Say before anything is loaded what a length costs (memory by part, time), and the longest that fits."""
    from traceforge_core.config import load_config
    from traceforge_core.longcontext import planner

    effective = load_config(preset, config, assignments)
    name = model or effective.model.name
    figures, text = planner.plan(
        effective, model=name, prompt=prompt, completion=completion, gpu_gib=gpu_gib, host_gib=host_gib, gpus=gpus,
        device_name=device,
    )  # fmt: skip
    if plot is not None:
        setup = planner.setup_of(effective, gpu_gib, host_gib, device)
        planner.plot(planner.read_dimensions(name), setup, completion, plot)
    _answer(figures, as_json, text)


def main() -> NoReturn:
    """Run the command line. Every way to end passes through here, so that each ends with one message and a status."""
    as_json = "--json" in sys.argv[1:]
    with _stdout_kept_for_the_answer(as_json), _stopped_by_signals(), _log_on_stderr():
        status = _guarded(as_json)
    logging.raiseExceptions = False
    sys.exit(status)


def _guarded(as_json: bool) -> int:
    try:
        if as_json and "--help" in sys.argv[1:]:
            with contextlib.redirect_stdout(io.StringIO()) as page:
                words = [word for word in sys.argv[1:] if word != "--json"]  # `traceforge --help` has no such option
                app(words, prog_name="traceforge", standalone_mode=False)
            _answer({"help": page.getvalue()}, True, "")
            return 0
        status = app(prog_name="traceforge", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except Unfinished as error:
        if not as_json:
            _tell(error.text)
        return _fail(str(error), error.status, as_json, error.answer)
    except TraceForgeError as error:
        return _fail(str(error), 1, as_json)
    except UsageError as error:
        if not as_json:
            error.show()
            return 1
        return _fail(error.format_message(), 1, as_json)
    except (Stopped, KeyboardInterrupt) as stop:
        return _fail("Stopped.", 128 + getattr(stop, "number", signal.SIGINT), as_json)
    except Exception as error:
        return _fail(_unexpected(error, None), 1, as_json)


def _fail(message: str, status: int, as_json: bool, answer: dict[str, Any] | None = None) -> int:
    if as_json:
        _answer({"error": message} | (answer or {}), True, "")
    else:
        _tell(f"traceforge: {message}")
    return status


def _unexpected(error: Exception, folder: Path | None) -> str:
    """One line about an error nobody foresaw. The full traceback goes to a file; a full disk is told as such."""
    from traceforge_core.runs import disk_is_full

    if disk_is_full(error):
        named = getattr(error, "filename", None)
        what = f" while writing {named}" if named else ""
        return f"The disk is full{what}. Free some space and run the same command again; finished stages are kept."
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"No permission to write or read {error.filename}: {error.strerror}. Choose another folder."
    text = "".join(traceback.format_exception(error))
    for candidate in (folder, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            if candidate is not None:
                (candidate / "traceback.txt").write_text(text, encoding="utf-8")
                where = candidate / "traceback.txt"
                return f"Something unexpected went wrong: {type(error).__name__}: {error}. The full traceback: {where}"
    return f"Something unexpected went wrong: {type(error).__name__}: {error}"


_answer_to: list[int] = []


def _answer(value: dict[str, Any], as_json: bool, text: str) -> None:
    if not as_json:
        print(text)
        return
    data = json.dumps(value, ensure_ascii=False, default=str) + "\n"
    if not _answer_to:
        sys.stdout.write(data)
        return
    with os.fdopen(os.dup(_answer_to[0]), "w", encoding="utf-8") as stdout:
        stdout.write(data)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _stdout_kept_for_the_answer(as_json: bool) -> Iterator[None]:
    """With --json whatever any library or child process prints goes to stderr, at the level of file descriptors."""
    if not as_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    _answer_to.append(kept)
    try:
        yield
    finally:
        _answer_to.remove(kept)
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or hang-up raises Stopped; more of them change nothing while things are being ended."""

    def stop(number: int, _frame: Any) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        _tell("\nStopping ...")
        raise Stopped(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _OnStderr(logging.Handler):
    """Writes to what sys.stderr is at that moment: a bar on the screen puts itself there, to stay below the lines."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed, or a pipe that nobody reads any more
            _tell(self.format(record))


@contextlib.contextmanager
def _log_on_stderr() -> Iterator[None]:
    handler = _OnStderr()
    handler.addFilter(lambda record: not STEP_LINE.match(record.getMessage()))  # live.py shows steps in its own way
    handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
    for logger in map(logging.getLogger, SHOWN_LOGGERS):
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in map(logging.getLogger, SHOWN_LOGGERS):
            logger.removeHandler(handler)


if __name__ == "__main__":
    main()
