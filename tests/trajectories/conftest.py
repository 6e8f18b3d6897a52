"""What the tests of reading share: a folder to fill, and one ingest of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from traceforge_core.config import load_config
from traceforge_core.trajectories.ingest import ingest
from traceforge_core.trajectories.store import read_trajectories

Ingest = Callable[..., SimpleNamespace]


@pytest.fixture
def run_ingest(tmp_path: Path) -> Ingest:
    """Ingest a folder; gives figures, trajectories, quarantine rows and the output folder."""

    def run(
        folder: Path, *, workers: int = 1, outcomes: list[str] | None = None, out: Path | None = None
    ) -> SimpleNamespace:
        out = out or tmp_path / "out"
        out.mkdir(exist_ok=True)
        config = load_config(
            assignments=[
                f"ingest.path={json.dumps(str(folder))}",
                f"ingest.workers={workers}",
                f"ingest.outcomes={json.dumps(outcomes or [])}",
            ]
        )
        figures = ingest(config, {}, out)
        assert figures["found"] == figures["read"] + figures["quarantined"] + figures["duplicates"]
        assert json.loads((out / "report.json").read_text()) == json.loads(json.dumps(figures))
        rows = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
        assert len(rows) == figures["quarantined"]
        trajectories = list(read_trajectories(out))
        assert len(trajectories) == figures["read"]
        return SimpleNamespace(figures=figures, trajectories=trajectories, quarantine=rows, out=out)

    return run


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Any], Path]:
    """Write a file below the corpus folder: text and bytes as they are, anything else as JSON."""

    def write_file(name: str, content: Any) -> Path:
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return tmp_path / "corpus"

    return write_file
