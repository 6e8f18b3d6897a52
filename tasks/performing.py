"""What every stage task does: perform the stage, show its log lines and its report in Prefect, say if it was reused."""

from __future__ import annotations

import base64
import contextlib
import logging
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

LOGGERS = ("traceforge_core", "tasks", "flows")


def perform_stage(name: str, config: RunConfig, run: Run, refresh: bool, **how: Any) -> State[StageResult]:
    """Do a stage inside a task run: state "Completed", or "Cached" where a result with the same key was there.
    `how` is for stages.perform."""
    with logs_to(get_run_logger()), progress_shown(name, run.partial_dir(name)):
        result = perform(name, config, run, refresh=refresh, **how)
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
    """Show a stage in Prefect's UI: its report if it wrote one, else its figures, with its plots inline."""
    report = next(iter(sorted(result.path.glob("*.md"))), None)
    text = report.read_text(encoding="utf-8") if report else figures_table(result.figures)
    for picture in sorted(result.path.glob("*.png")):
        link = f"]({picture.name})"  # a relative link leads nowhere in the UI
        text = text.replace(link, f"]({data_url(picture)})") if link in text else f"{text}\n\n{inline_picture(picture)}"
    create_markdown_artifact(
        key=f"{result.stage.replace('_', '-')}-report",
        markdown=f"{text}\n\nFiles: `{result.path}`\n",
        description=f"{STAGES[result.stage].title}: {'reused' if result.reused else f'{result.seconds:.1f} s'}",
    )


def inline_picture(path: Path) -> str:
    """A PNG inside Markdown, so that it shows without a file host."""
    return f"![{path.stem}]({data_url(path)})"


def data_url(path: Path) -> str:
    """A PNG file as a data: URL."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def figures_table(figures: Mapping[str, Any]) -> str:
    """Figures as a Markdown table, nested ones with dotted names."""

    def rows(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from rows(value, f"{prefix}{name}.")
            else:
                yield f"| {prefix}{name} | {value} |"

    return "\n".join(["| figure | value |", "| --- | --- |", *rows(figures, "")])
