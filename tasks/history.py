"""Task: add a run to the history of comparisons, and show how they go. After the last stage, whatever became of it."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from tasks.performing import inline_picture, logs_to
from traceforge_core.comparison.history import blame, entry_of, failed_entry, read, record
from traceforge_core.comparison.trend import write_trend
from traceforge_core.runs import Run


@task(name="Add to the history", task_run_name="history", tags=["comparison", "cpu"], cache_policy=NO_CACHE)
def add_to_history(run: Run, history: Path, error: str | None = None) -> str | None:
    """Record a run in `<history>.sqlite`, write the trend into the folder `history`, publish it. `error`: why the run
    ended before its comparison. Returns what changed since runs were good; None while this one is."""
    with logs_to(get_run_logger()):
        entry = entry_of(run) if error is None else failed_entry(run, error)
        record(history.with_suffix(".sqlite"), entry)
        entries = read(history.with_suffix(".sqlite"))
        write_trend(entries, history)
    text = (history / "trend.md").read_text(encoding="utf-8").replace("](trend.png)", "](#plots)")
    create_markdown_artifact(
        key="comparison-trend",
        markdown=f"{text}\n\n{inline_picture(history / 'trend.png')}\n\nFiles: `{history}`\n",
        description=f"{len(entries)} runs, the last one: {entry.verdict}",
    )
    change = blame(entries)
    return change.sentence if change else None
