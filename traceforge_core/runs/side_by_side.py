"""Runs side by side: where their configurations, versions and figures differ.

differences([Run.open(runs, "20261101-043000"), Run.open(runs)])
# {"config.sft.learning_rate": {"20261101-043000": 1e-4, "20261130-043000": 2e-4}, ...}
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from traceforge_core.runs import NOT_OURS, Run
from traceforge_core.stages import STAGES


def differences(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """What differs, by dotted name, with its value by run id; None for what a run does not have.

    Names are `config.<field>`, `versions.<library>` and `<stage>.<figure>`, in this order, stages in the pipeline's.
    """
    facts = {run.run_id: dict(_facts(run)) for run in runs}
    names = dict.fromkeys(name for of_run in facts.values() for name in of_run)
    order = ["config", "versions", *STAGES]
    table = {}
    for name in sorted(names, key=lambda name: order.index(name.partition(".")[0])):
        values = {run_id: of_run.get(name) for run_id, of_run in facts.items()}
        if len({json.dumps(value, sort_keys=True) for value in values.values()}) > 1:
            table[name] = values
    return table


def _facts(run: Run) -> Iterator[tuple[str, Any]]:
    with contextlib.suppress(*NOT_OURS):
        yield from _leaves("config", json.loads((run.path / "config.json").read_text(encoding="utf-8")))
    for stage in STAGES:
        if (result := run.result(stage)) is None:
            continue
        with contextlib.suppress(*NOT_OURS):
            manifest = json.loads((result.path / "manifest.json").read_text(encoding="utf-8"))
            yield from _leaves("versions", manifest["versions"])
        yield from _leaves(stage, result.figures | {"seconds": result.seconds})


def _leaves(prefix: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        yield prefix, tree
        return
    for name, value in tree.items():
        yield from _leaves(f"{prefix}.{name}", value)
