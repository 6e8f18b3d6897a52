"""Before a run: init, config, stages, doctor, plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.answers import answer
from flows.cli.options import AsJson, Assignments, ConfigFile, Preset, RunsDir, known_presets


def init(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The YAML file to write.")] = Path(
        "traceforge.yaml"
    ),
    data: Annotated[
        str, typer.Option("--data", metavar="PATH", help="Folder or file with your trajectories, or `samples`.")
    ] = "samples",
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="A folder, a hub id, or tiny; default: the preset's.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            autocompletion=known_presets,
            help="Lie over this preset; default: what suits this machine.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a short, commented configuration for your data, model and machine, and check it."""
    from dataclasses import asdict

    from traceforge_core.initialise import initialise

    written = initialise(out, data=data, model=model, preset=preset, force=force)
    lines = [f"{written.path}: over the preset {written.preset} ({written.reason}).", *written.notes]
    answer(asdict(written), as_json, "\n".join([*lines, f"Next: {written.command}"]))


def show_config(
    preset: Preset = None, config: ConfigFile = None, assignments: Assignments = None, as_json: AsJson = False
) -> None:
    """Print the effective configuration as YAML, each field with its description."""
    from flows.cli.described import described
    from traceforge_core.config import DEFAULT_PRESET, load_config, preset_in, preset_names

    effective = load_config(preset, config, assignments)
    chosen = preset or preset_in(config) or DEFAULT_PRESET
    head = f"# Preset: {chosen}. Presets: {', '.join(preset_names())}.\n"
    answer(effective.model_dump(mode="json"), as_json, head + described(effective))


def stages(as_json: AsJson = False) -> None:
    """List the stages in order, with what each needs."""
    from traceforge_core.stages import STAGES

    listed = [{"stage": stage.name, "title": stage.title, "needs": list(stage.needs)} for stage in STAGES.values()]
    lines = [f"{stage.name:<16} {stage.title:<34} needs: {', '.join(stage.needs) or '-'}" for stage in STAGES.values()]
    answer({"stages": listed}, as_json, "\n".join(lines))


def doctor(runs_dir: RunsDir = Path("runs"), as_json: AsJson = False) -> None:
    """Look this machine over: what it has, what is installed, what really works, and the preset that suits.

    Exit status 1 where something will not work.
    """
    from flows.cli.live import at_work
    from flows.cli.terminal import columns
    from traceforge_core.doctor.examine import examine
    from traceforge_core.doctor.report import render

    with at_work("looking this machine over", bars=not as_json):
        checkup = examine(runs_dir)
    answer(checkup.to_json(), as_json, render(checkup, columns()))
    if checkup.problems:
        raise typer.Exit(1)


def plan(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder, config.json or hub id; default: model.name.")
    ] = None,
    prompt: Annotated[int, typer.Option("--prompt", min=1, metavar="TOKENS", help="Tokens of the prompt.")] = 77_824,
    completion: Annotated[
        int, typer.Option("--completion", min=1, metavar="TOKENS", help="Tokens of a completion.")
    ] = 4_096,
    gpu_gib: Annotated[float, typer.Option("--gpu-gib", min=0.1, metavar="GIB", help="Memory of one GPU.")] = 24,
    host_gib: Annotated[
        float | None, typer.Option("--host-gib", min=0, metavar="GIB", help="Host memory that may be pinned.")
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, metavar="COUNT", help="How many GPUs.")] = 2,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="GPU whose measured rates give the time.")
    ] = "H200",
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Write length against memory to this PNG.")
    ] = None,
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
        setup = planner.setup_of(effective, "branch_parallel", gpu_gib, host_gib, device)
        planner.plot(planner.read_dimensions(name), setup, completion, plot)
    answer(figures, as_json, text)
