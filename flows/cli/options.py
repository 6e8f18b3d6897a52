"""Options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Of which "latest" is the newest that has them, for commands that work on what was trained.
TRAINED = ("model", "datasets", "sft")

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
