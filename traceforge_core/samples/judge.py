"""Which patches really solve their case: each is applied to a fresh copy and all tests are run, the hidden ones too."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any, Literal, get_args

from traceforge_core.samples.cases import Case
from traceforge_core.samples.workbench import Workbench

Verdict = Literal["resolved", "unresolved", "empty_patch", "error"]


def judge(case: Case, patch: str) -> Verdict:
    """The verdict on a submitted patch. `error`: it does not apply."""
    if not patch.strip():
        return "empty_patch"
    with Workbench(case.program) as bench:
        (bench.folder / "submitted.patch").write_text(patch, encoding="utf-8")
        if bench.run("git apply submitted.patch").returncode != 0:
            return "error"
        for test in case.hidden_tests.glob("*.py"):
            shutil.copy(test, bench.folder / "tests" / test.name)
        return "resolved" if bench.run("python -m unittest").returncode == 0 else "unresolved"


def run_report(verdicts: Mapping[str, Verdict]) -> dict[str, Any]:
    """A SWE-bench run report (schema 2) of one run's verdicts by case."""
    ids = {
        verdict: sorted(case for case, given in verdicts.items() if given == verdict) for verdict in get_args(Verdict)
    }
    completed = sorted(ids["resolved"] + ids["unresolved"])
    everything = sorted(verdicts)
    return {
        "total_instances": len(everything),
        "submitted_instances": len(everything),
        "completed_instances": len(completed),
        "resolved_instances": len(ids["resolved"]),
        "unresolved_instances": len(ids["unresolved"]),
        "empty_patch_instances": len(ids["empty_patch"]),
        "error_instances": len(ids["error"]),
        "completed_ids": completed,
        "incomplete_ids": [],
        "empty_patch_ids": ids["empty_patch"],
        "submitted_ids": everything,
        "resolved_ids": ids["resolved"],
        "unresolved_ids": ids["unresolved"],
        "error_ids": ids["error"],
        "schema_version": 2,
    }
