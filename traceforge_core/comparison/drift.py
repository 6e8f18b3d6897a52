"""What has been getting worse from run to run while every verdict was still a pass.

    [one.sentence for one in drifts(read(history))]
    # ["branch_parallel/adapter difference is larger than in all 9 good runs before: 2e-08 then, 4e-08 in the last 3."]

A run alone is judged by its limits; a drift shows only beside the runs before it. It is told and fails nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from traceforge_core.comparison.history import Entry

RECENT = 3
BEFORE = 8  # good runs that there must be before those: three of eleven are the three largest by chance once in 165
# By the end of a figure's name: which way is worse, and by what factor it must have gone there to be worth a word.
WORSE: dict[str, tuple[str, float]] = {
    "difference": ("larger", 1.5),
    "share of its limit": ("larger", 1.5),
    "seconds a step": ("larger", 1.5),
    "held-out actions loss": ("larger", 1.05),
    "held-out pairs accuracy": ("smaller", 1.1),
    "held-out pairs margin": ("smaller", 1.1),
    "held-out actions token_accuracy": ("smaller", 1.05),
}


@dataclass(frozen=True, slots=True)
class Drift:
    """A figure whose last RECENT values are all worse than in every good run before. before, now: medians. runs: how
    many it was held against."""

    figure: str
    worse: str
    before: float
    now: float
    runs: int

    @property
    def sentence(self) -> str:
        return (
            f"{self.figure} is {self.worse} than in all {self.runs} good runs before: {self.before:.3g} then, "
            f"{self.now:.3g} in the last {RECENT}."
        )


def drifts(entries: Sequence[Entry]) -> list[Drift]:
    """What drifts, by name. `entries`: oldest first. [] until there are BEFORE + RECENT good runs, and while the last
    run is no good one: then there is something worse to tell."""
    if not entries or not entries[-1].good:
        return []
    found = []
    good = [entry for entry in entries if entry.good]
    for figure in sorted(good[-1].figures):
        values = [entry.figures[figure] for entry in good if figure in entry.figures]
        way = next((told for end, told in WORSE.items() if figure.endswith(end)), None)
        if way is None or len(values) < BEFORE + RECENT:
            continue
        worse, factor = way
        before, now = values[:-RECENT], values[-RECENT:]
        old, new = median(before), median(now)
        beyond = min(now) > max(before) if worse == "larger" else max(now) < min(before)
        # A difference of exactly 0 that is one no longer has no factor: it has changed.
        if beyond and (abs(new - old) >= (factor - 1) * abs(old)):
            found.append(Drift(figure, worse, old, new, len(before)))
    return found
