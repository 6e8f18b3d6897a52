"""`traceforge runs` as people and scripts use it."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.commands import app
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import Inputs, Run, run_stage


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    for run_id, days in (("first", 50), ("second", 40), ("third", 0)):
        run = Run.create(tmp_path, run_id)
        run.save_config({"sft": {"seed": days}})

        def fill(out_dir: Path) -> dict[str, Any]:
            (out_dir / "data.bin").write_bytes(os.urandom(1 << 16))
            return {}

        run_stage(run, "ingest", {"of": run_id}, Inputs(), fill)
        then = time.time() - days * 86400
        os.utime(run.path / "config.json", (then, then))
    return tmp_path


def ask(*arguments: str) -> Any:
    done = CliRunner().invoke(app, ["runs", *arguments], catch_exceptions=False, standalone_mode=False)
    return done.stdout


def test_the_list_shows_age_size_and_what_is_never_pruned(runs_dir: Path) -> None:
    told = ask("--runs-dir", str(runs_dir))
    assert re.search(r"first +50 days ago +\d\d\.0 KiB", told)
    assert "never pruned: the newest run" in told and "3 runs take" in told
    answer = json.loads(ask("--runs-dir", str(runs_dir), "--json"))
    assert [run["run"] for run in answer["runs"]] == ["first", "second", "third"]
    assert answer["runs"][0]["stages"] == ["ingest"] and answer["bytes"] > 3 << 16


def test_pruning_says_what_it_would_do_and_does_it_only_when_told_yes(runs_dir: Path) -> None:
    told = ask("--runs-dir", str(runs_dir), "--prune", "--older-than", "45")
    assert "Would remove 1 of 3 runs" in told and "say --yes" in told
    assert (runs_dir / "first").is_dir()
    answer = json.loads(ask("--runs-dir", str(runs_dir), "--prune", "--total-gib", "0", "--yes", "--json"))
    assert answer["removed"] == ["first", "second"] and answer["never_removed"] == {"third": "the newest run"}
    assert answer["bytes_freed"] > 2 << 16 and "never removed" in answer["note"]
    assert sorted(path.name for path in runs_dir.iterdir()) == ["third"]


def test_side_by_side_fits_the_terminal(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    lines = ask("first", "third", "--runs-dir", str(runs_dir)).splitlines()
    assert all(len(line) <= 70 for line in lines)


def test_two_runs_are_laid_side_by_side(runs_dir: Path) -> None:
    told = ask("first", "latest", "--runs-dir", str(runs_dir))
    assert "config.sft.seed" in told and "50" in told and "third" in told
    answer = json.loads(ask("first", "third", "--runs-dir", str(runs_dir), "--json"))
    assert answer["differences"]["config.sft.seed"] == {"first": 50, "third": 0}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("first",), "traceforge show first"),
        (("first", "second", "--prune"), "Leave the names out"),
        (("--yes",), "are for --prune"),
        (("--prune",), "--older-than DAYS"),
        (("first", "nowhere"), "There is no run 'nowhere'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_do(arguments: tuple[str, ...], told: str, runs_dir: Path) -> None:
    with pytest.raises(TraceForgeError, match=told):
        ask(*arguments, "--runs-dir", str(runs_dir))


def test_no_runs_is_no_error(tmp_path: Path) -> None:
    assert "There are no runs" in ask("--runs-dir", str(tmp_path / "none"))
