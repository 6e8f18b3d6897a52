"""What a comparison said of a strategy in which a fault was planted, or none.

found = detection("mean_of_gradients", judge_exactly(parity, config.comparison))
found.caught, found.right               # noticed at all; and the report points at what was done
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from traceforge_core.comparison.faults.registry import FAULTS
from traceforge_core.comparison.verdict import Finding, Verdict

CLEAN = "clean"


@dataclass(frozen=True, slots=True)
class Detection:
    """What the comparison said of one planted fault (or of none, CLEAN). outcome: pass, fail, or stopped, where the
    workers themselves refused to go on. pointed_at, step: what is wrong first. left: all quantities that left their
    limits. statistic: the first one's, in units of its limit. exact: what the float32 comparison beside a bfloat16 one
    said; a run is as good as the worse of the two."""

    fault: str
    outcome: str
    pointed_at: str | None
    step: int | None
    left: tuple[str, ...]
    statistic: float
    reason: str
    exact: Detection | None = None

    @property
    def decisive(self) -> Detection:
        """The float32 one where it found something, since no rounding hides what is wrong first there; else this one,
        unless it found nothing either."""
        if self.exact is None or self.outcome == "stopped":
            return self
        return self if self.exact.pointed_at is None and self.outcome == "fail" else self.exact

    @property
    def caught(self) -> bool:
        return self.decisive.outcome in ("fail", "stopped")

    @property
    def right(self) -> bool:
        """Whether the report points at what was done (for a clean run: whether it raises no alarm)."""
        told = self.decisive
        if self.fault == CLEAN:
            return told.outcome == "pass"
        expected = FAULTS[self.fault]
        return told.outcome == "stopped" if expected.stopped else told.pointed_at in expected.points_at

    def as_dict(self) -> dict[str, Any]:
        """As plain data for JSON; the float32 comparison's part beside it."""
        row: dict[str, Any] = {
            "fault": self.fault,
            "outcome": self.outcome,
            "points_at": self.pointed_at,
            "step": self.step,
        }
        row |= {"statistic": self.statistic if math.isfinite(self.statistic) else None, "reason": self.reason}
        return row | ({"exact": self.exact.as_dict()} if self.exact is not None else {})


def detection(fault: str, verdict: Verdict) -> Detection:
    """A verdict as what it says of a planted fault."""
    first = verdict.first
    share = 0.0
    if first is not None:
        share = abs(first.value) / first.limit if first.limit else float("inf")
    return Detection(
        fault,
        verdict.outcome,
        first.quantity if first else None,
        first.step if first else None,
        tuple(finding.quantity for finding in verdict.findings),
        share,
        verdict.reasons[0],
    )


def detection_in(fault: str, told: Mapping[str, Any]) -> Detection:
    """The same, of a verdict as compare_exactly gives it."""
    if "findings" not in told:
        return Detection(fault, "stopped", None, None, (), float("inf"), told["reasons"][0])
    findings = [Finding(**one) for one in told["findings"]]
    return detection(fault, Verdict(told["outcome"], told["reasons"], findings[0] if findings else None, findings))
