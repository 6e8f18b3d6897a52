"""How log lines and reports reach Prefect, without a server."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from tasks import performing
from tasks.performing import figures_table, logs_to, publish
from traceforge_core.runs import StageResult
from traceforge_core.training.records import StepRecord, append_record


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run_logger(name: str) -> tuple[logging.Logger, list[str]]:
    logger, lines = logging.getLogger(name), Lines()
    logger.handlers[:] = [lines]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger, lines.lines


def test_lines_of_any_thread_reach_the_innermost_run_and_nothing_stays_attached() -> None:
    core = logging.getLogger("traceforge_core.training.launch")
    outer, of_flow = run_logger("a flow run")
    inner, of_task = run_logger("a task run")
    before = list(logging.getLogger("traceforge_core").handlers)
    with logs_to(outer):
        core.info("before the stage")
        with logs_to(inner):
            thread = threading.Thread(target=core.info, args=("100%% of step %d", 7))
            thread.start()
            thread.join()
        core.info("after the stage")
    core.info("nobody listens")
    assert of_flow == ["before the stage", "after the stage"]
    assert of_task == ["100% of step 7"]
    assert logging.getLogger("traceforge_core").handlers == before


def test_figures_become_a_table_for_people() -> None:
    figures = {
        "peak_memory_mib": 675.99609375,
        "bytes": 7022051,
        "by_outcome": {"resolved": 2, "a|b_c": 0},
        "conflicts": [],
        "note": None,
        "learning_rate": 0.00012345678,
    }
    assert figures_table(figures).splitlines()[2:] == [
        "| peak memory mib | 676 |",
        "| bytes | 7,022,051 |",
        "| by outcome: resolved | 2 |",
        "| by outcome: a\\|b_c | 0 |",
        "| learning rate | 0.0001235 |",
    ]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(performing, "create_markdown_artifact", lambda **call: calls.append(call))
    return calls


def test_a_report_is_published_with_its_plots_inline(tmp_path: Path, published: list[dict[str, Any]]) -> None:
    links = "[steps](../sft/metrics.jsonl), [numbers](report.json), [TRL](https://huggingface.co/docs/trl)"
    (tmp_path / "report.md").write_text(f"# Agreement\n\n![loss](loss.png)\n\n{links}\n")
    (tmp_path / "loss.png").write_bytes(b"\x89PNG")
    publish(StageResult("branch_parallel", tmp_path, "key", {"steps": 3}, 1.5))
    [call] = published
    assert call["key"] == "branch-parallel-report"
    assert "# Agreement\n\n![loss](data:image/png;base64,iVBORw==)\n" in call["markdown"]
    assert str(tmp_path) in call["markdown"]
    assert "steps, numbers, [TRL](https://huggingface.co/docs/trl)" in call["markdown"], "no link leads nowhere"


def test_a_stage_that_trained_shows_its_curves(tmp_path: Path, published: list[dict[str, Any]]) -> None:
    for step in (1, 2, 3):
        append_record(tmp_path / "metrics.jsonl", StepRecord(step, 2.0 / step, margin=0.1 * step, peak_memory_mib=9.0))
    publish(StageResult("oracle", tmp_path, "key", {"steps": 3}, 1.5))
    picture, _, rest = published[0]["markdown"].partition("\n")
    assert picture.startswith("![curves](data:image/png;base64,iVBOR") and "| steps | 3 |" in rest


def test_without_a_report_the_figures_are_published(tmp_path: Path, published: list[dict[str, Any]]) -> None:
    publish(StageResult("sft", tmp_path, "key", {"steps": 3}, 1.5, reused=True))
    assert "| steps | 3 |" in published[0]["markdown"] and "reused" in published[0]["description"]
