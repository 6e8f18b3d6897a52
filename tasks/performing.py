"""What every stage task does: perform the stage, show its log lines and its report in Prefect, say if it was reused."""

from __future__ import annotations

import base64
import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger
from prefect.states import Completed, State

from tasks.assets import describe
from tasks.showing import progress_shown
from traceforge_core.config import RunConfig
from traceforge_core.runs import Run, StageResult
from traceforge_core.stages import STAGES, perform
from traceforge_core.training.curves import plot_training
from traceforge_core.training.records import read_records

LOGGERS = ("traceforge_core", "tasks", "flows")
# Of reports that were written for a reader of files: [steps](../oracle/metrics.jsonl)
RELATIVE_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?![a-z]+:|#)[^)\s]+\)")


def perform_stage(name: str, config: RunConfig, run: Run, refresh: bool, **how: Any) -> State[StageResult]:
    """Do a stage inside a task run: state "Completed", or "Cached" where a result with the same key was there.
    `how` is for stages.perform."""
    with logs_to(get_run_logger()), progress_shown(name, run.partial_dir(name)) as shown:
        result = perform(name, config, run, refresh=refresh, **how)
        shown.done = f"done in {result.seconds:.1f} s"
    describe(run, result)
    publish(result)
    if result.reused:
        return Completed(name="Cached", data=result, message=f"The result in {result.path} is still valid.")
    return Completed(data=result, message=f"Wrote {result.path}.")


class _Forward(logging.Handler):
    """Hands log lines to a Prefect run's logger, which carries the run's id into any thread."""

    def __init__(self, run_logger: logging.Logger | logging.LoggerAdapter[Any]) -> None:
        super().__init__(logging.INFO)
        self._run_logger = run_logger

    def emit(self, record: logging.LogRecord) -> None:
        self._run_logger.log(record.levelno, "%s", record.getMessage(), exc_info=record.exc_info)


@contextlib.contextmanager
def logs_to(run_logger: logging.Logger | logging.LoggerAdapter[Any]) -> Iterator[None]:
    """Send this project's log lines to a Prefect run, from whichever thread they come. The innermost block has them."""
    handler = _Forward(run_logger)
    before = {}
    for logger in map(logging.getLogger, LOGGERS):
        outer = [other for other in logger.handlers if isinstance(other, _Forward)]
        before[logger] = (logger.level, logger.propagate, outer)
        for other in outer:
            logger.removeHandler(other)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # the root logger would print warnings a second time
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, (level, propagate, outer) in before.items():
            logger.removeHandler(handler)
            for other in outer:
                logger.addHandler(other)
            logger.setLevel(level)
            logger.propagate = propagate


def publish(result: StageResult) -> None:
    """Show a stage in Prefect's UI: its report if it wrote one, else its figures, with its plots inline. A stage that
    trained has its curves plotted."""
    report = next(iter(sorted(result.path.glob("*.md"))), None)
    text = report.read_text(encoding="utf-8") if report else figures_table(result.figures)
    for picture in sorted(result.path.glob("*.png")):
        link = f"]({picture.name})"  # a relative link leads nowhere in the UI
        shown = inline_picture(picture)
        text = text.replace(link, shown[shown.index("](") :]) if link in text else f"{text}\n\n{shown}"
    text = RELATIVE_LINK.sub(r"\1", text)
    steps = result.path / "metrics.jsonl"
    if steps.is_file() and (records := read_records(steps)):
        text = f"{_inline('curves', plot_training(records))}\n\n{text}"
    create_markdown_artifact(
        key=f"{result.stage.replace('_', '-')}-report",
        markdown=f"{text}\n\nFiles: `{result.path}`\n",
        description=f"{STAGES[result.stage].title}: {'reused' if result.reused else f'{result.seconds:.1f} s'}",
    )


def inline_picture(path: Path) -> str:
    """A PNG inside Markdown, so that it shows without a file host."""
    return _inline(path.stem, path.read_bytes())


def _inline(says: str, png: bytes) -> str:
    return f"![{says}](data:image/png;base64,{base64.b64encode(png).decode()})"


def figures_table(figures: Mapping[str, Any]) -> str:
    """Figures as a Markdown table for people: nested ones with their group in front, numbers rounded, what is empty
    left out. All digits are in the stage's manifest."""

    def rows(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
        for name, value in values.items():
            # Names out of data are nobody's to change; a bar would begin another cell.
            told = name.replace("|", "\\|") if prefix else name.replace("_", " ")
            if isinstance(value, Mapping):
                yield from rows(value, f"{prefix}{told}: ")
            elif value not in (None, "", [], ()):
                yield f"| {prefix}{told} | {_plain(value)} |"

    return "\n".join(["| figure | value |", "| --- | --- |", *rows(figures, "")])


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value).replace("|", "\\|").replace("\n", " ")
