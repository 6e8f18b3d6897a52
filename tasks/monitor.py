"""Task: watch GPUs and training processes. The one task that is submitted; whoever does so sets `stop` in `finally`."""

from __future__ import annotations

import threading
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from tasks.performing import inline_picture
from traceforge_core.monitoring import gpu, host
from traceforge_core.monitoring.plots import draw_plots


@task(
    name="Watch GPUs and host",
    task_run_name="monitor",
    tags=["monitoring"],
    cache_policy=NO_CACHE,  # an Event cannot be hashed
)
def monitor(folder: Path, interval: float, stop: threading.Event, root_pid: int, ignore: frozenset[int]) -> list[Path]:
    """Sample into CSVs in `folder` until `stop` is set, then draw and publish the plots. Returns the plots' paths."""
    cards = threading.Thread(target=gpu.watch, args=(folder, interval, stop, root_pid), daemon=True)
    cards.start()
    host.watch(folder, interval, stop, root_pid, ignore)
    cards.join()
    plots = draw_plots(folder)
    if plots:
        pictures = "\n\n".join(inline_picture(plot) for plot in plots)
        create_markdown_artifact(
            key="monitoring", markdown=f"{pictures}\n\nFiles: `{folder}`\n", description="GPUs and training processes"
        )
    return plots
