"""Options that several commands take, and what the Tab key offers for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Of which "latest" is the newest that has them, for commands that work on what was trained.
TRAINED = ("model", "datasets", "sft")


def known_presets(incomplete: str) -> list[str]:
    """Names of presets that begin so."""
    from traceforge_core.config import preset_names

    return [name for name in preset_names() if name.startswith(incomplete)]


def known_stages(incomplete: str) -> list[str]:
    """Lists of stages that begin so, each one name longer than what is typed."""
    from traceforge_core.stages import STAGES

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in STAGES if name.startswith(last) and name not in before.split(",")]


def known_runs(context: typer.Context, incomplete: str) -> list[str]:
    """Runs that begin so, the newest first, in the folder that --runs-dir names."""
    folder = Path(context.params.get("runs_dir") or "runs")
    found = sorted((each.parent.name for each in folder.glob("*/config.json")), reverse=True)
    return [name for name in ["latest", *found] if name.startswith(incomplete)]


AsJson = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]
RunsDir = Annotated[Path, typer.Option("--runs-dir", metavar="DIR", help="The folder in which runs lie.")]
AnyRun = Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or latest.", autocompletion=known_runs)]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help="Start from this preset; default: the one that --config names, else tiny-cpu.",
        autocompletion=known_presets,
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML file with what differs from the preset.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="A setting, such as sft.max_steps=20. May be repeated."),
]
