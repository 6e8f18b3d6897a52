"""The command `traceforge data`: a report on stdout and a page with samples."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from traceforge_core.config import load_config
from traceforge_core.runs import Run
from traceforge_core.stages import perform

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_data_prints_the_report_and_writes_a_page_with_samples(tmp_path: Path) -> None:
    config = load_config()
    run = Run.create(tmp_path / "runs", "mine")
    run.save_config(config.model_dump(mode="json"))
    command = [sys.executable, "-m", "flows.cli", "data", "mine", "--runs-dir", str(tmp_path / "runs")]
    command += ["--out", str(tmp_path / "page.html")]

    early = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True)
    assert early.returncode == 1
    assert "ingest" in json.loads(early.stdout)["error"]

    for stage in ("ingest", "model", "datasets"):
        result = perform(stage, config, run)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "SFT samples" in done.stdout and "page.html" in done.stdout
    assert "| ---" not in done.stdout and "**" not in done.stdout, "a terminal shows no Markdown"
    assert "As the model sees it" in (tmp_path / "page.html").read_text(encoding="utf-8")
    answer = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout)["datasets"]["sft_samples"] == result.figures["sft_samples"]
