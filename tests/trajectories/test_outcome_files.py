"""What outcome files of every kind state, what is no outcome file, and which ends of a run are no judgement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trajectories.make import FLAT, mini_v2, report
from traceforge_core.errors import TraceForgeError
from traceforge_core.trajectories.outcome_files import Claim, claims_in, is_infrastructure


def test_every_kind_of_outcome_file_is_understood():
    assert claims_in(report(["a"], ["b"], empty_patch_ids=["c"], error_ids=["d"], incomplete_ids=["e"])) == [
        Claim("a", "resolved", "resolved_ids"),
        Claim("b", "unresolved", "unresolved_ids"),
        Claim("c", "unresolved", "empty_patch_ids"),
    ]
    assert claims_in({"resolved": 1, "ids_resolved": ["a"], "ids_unresolved": ["b"]}) == [
        Claim("a", "resolved", "ids_resolved"),
        Claim("b", "unresolved", "ids_unresolved"),
    ]
    assert claims_in(FLAT) == [Claim(None, "resolved", "resolved")]
    assert claims_in({"a__b-1": FLAT}) == [Claim("a__b-1", "resolved", "resolved")]
    assert claims_in({"trial_name": "t", "verifier_result": {"rewards": {"reward": 0.0}}}) == [
        Claim(None, "unresolved", "reward")
    ]
    assert claims_in({"trial_name": "t", "exception_info": {"x": 1}, "verifier_result": None}) == []
    rows = [("a", True, "unset"), ("b", False, "context_length_exceeded"), ("c", False, "test_timeout")]
    value = {"results": [{"task_id": a, "is_resolved": b, "failure_mode": c} for a, b, c in rows]}
    assert claims_in(value) == [Claim("a", "resolved", "is_resolved"), Claim("b", "unresolved", "is_resolved")]


@pytest.mark.parametrize(
    "value", [{}, [], {"messages": [], "resolved_ids": []}, {"resolved": True}, 3, {"a": {"b": 1}}]
)
def test_what_is_no_outcome_file_is_not_taken_for_one(value: Any):
    assert not claims_in(value)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("Submitted", False),
        ("LimitsExceeded", False),
        ("RepeatedFormatError", False),
        ("submitted (exit_cost)", False),
        ("exit_context", False),
        ("Agent reached maximum iteration", False),
        (None, False),
        ("InternalServerError", True),
        ("Timeout", True),
        ("TimeExceeded", True),
        ("RateLimitError", True),
        ("exit_environment_error", True),
    ],
)
def test_ends_that_are_no_judgement_of_the_model(status: str | None, expected: bool):
    assert is_infrastructure(status) is expected


@pytest.mark.parametrize("text", ["case,run,resolved\na,,maybe\n", "name\nx\n"])
def test_a_table_that_cannot_be_understood_names_its_line(write, run_ingest, tmp_path: Path, text: str):
    folder = write("a.traj.json", mini_v2())
    table = tmp_path / "labels.csv"
    table.write_text(text)
    with pytest.raises(TraceForgeError, match=r"labels\.csv line 2"):
        run_ingest(folder, outcomes=[str(table)])
