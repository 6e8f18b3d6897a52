"""What a comparison comes to: its verdict, what is wrong first, and what must hold whatever the precision.

    failed(findings).first.sentence             # "gradient norm, first at step 1: ..., look at SUM against MEAN ..."

By what limits is for tolerances.py (float32) and noise.py (bfloat16) to say.

A step is a chain: weights and pairs give scores, these the loss, this the gradients, these and the rate the next
weights. Whatever is wrong makes everything after it wrong too, so a report names the earliest step at which anything
leaves its limit and, in that step, the first link of the chain that does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from traceforge_core.comparison.parity import Parity, StepDifference
from traceforge_core.config import ComparisonConfig

CHAIN = (
    "start",
    "data order",
    "adapter",
    "scored tokens",
    "score",
    "loss",
    "gradient direction",
    "gradient norm",
    "learning rate",
    "saved adapter",
)
EXPLAINED = {
    "start": "The two did not begin from the same state, so nothing after it can be compared.",
    "data order": "The steps did not take the same pairs in the same order: look at sampler, seed and collation.",
    "adapter": "Everything agreed until then, so the step before moved the weights in another way: look at the "
    "optimizer, weight decay, and whether every worker took that step.",
    "scored tokens": "Other tokens are scored than the oracle's: look at label masks, logits_to_keep, the last token.",
    "score": "The same tokens get other log-probabilities: look at the forward (attention, positions, adapter scale, "
    "label shift, mean or sum) and at what the branches exchange.",
    "loss": "The scores agree and the loss does not: look at β, γ, label smoothing and accumulation.",
    "gradient direction": "Scores and loss agree and the gradient points elsewhere: look at what is detached, clipped, "
    "masked or not summed, and, where an adapter is young, at its scale.",
    "gradient norm": "The gradient points the right way but has another length: look at SUM against MEAN, loss scale, "
    "clipping before the sum and, where an adapter is young, its scale.",
    "saved adapter": "Weights, loaded with that, compute another model than was trained: look at what saves them.",
    "learning rate": "The step was taken with another rate: look at the schedule and its number of steps.",
}
EXACT_RATE = 1e-9
# Workers begin with the same bits and take the same step of the same sum: at most a step's rounding is between them.
APART = 2.0**-22


@dataclass(frozen=True, slots=True)
class Finding:
    """A quantity that left its limit, first at `step` (one past the last for the final adapter). value, limit: the
    statistic there and what it may be. detail: what exactly, in words."""

    quantity: str
    step: int
    value: float
    limit: float
    detail: str

    @property
    def sentence(self) -> str:
        return f"{self.quantity}, first at step {self.step}: {self.detail}. {EXPLAINED[self.quantity]}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a candidate lies in one quantity. difference: its difference from the oracle at `step`, where it stands out
    most; scale: what it is measured in there, the oracle's own noise or the float32 limit. statistic: difference in
    those units (of the test that stands out most), limit: what it may be. left_at: first step at which any test is over
    its limit, None where it stays within. what: the detail in words."""

    quantity: str
    name: str
    step: int
    difference: float
    scale: float
    statistic: float
    limit: float
    left_at: int | None
    what: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """`outcome`: "pass", "fail", or "undecided" (no yardstick for this precision). `reasons`: what it rests on.
    `first`: what is wrong first; `findings`: the first step of every quantity that left its limit, worst link first.
    `places`: every quantity that was measured against something."""

    outcome: str
    reasons: list[str]
    first: Finding | None = None
    findings: list[Finding] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)


def judge_without_yardstick(parity: Parity, tolerances: ComparisonConfig, dtype: str) -> Verdict:
    """What must hold in any precision: equal start, pairs, tokens and rates, equal weights on all workers, finite
    numbers. The rest stays undecided."""
    findings = invariant_findings(parity, tolerances)
    if findings:
        return failed(findings)
    return Verdict(
        "undecided",
        [
            f"start, data, scored tokens and learning rates are equal and all numbers are finite; in {dtype} rounding "
            "alone makes differences, and the oracle's own noise was not measured (stage noise_floor), so they are "
            "stated without a judgement",
        ],
    )


def failed(findings: list[Finding], reasons: list[str] | None = None) -> Verdict:
    """The verdict that follows from findings: what is wrong first comes first."""
    ordered = in_order(findings)
    return Verdict("fail", [ordered[0].sentence, *(reasons or [])], ordered[0], ordered)


def in_order(findings: list[Finding]) -> list[Finding]:
    """The first finding of each quantity, by step and then along the chain."""
    first: dict[str, Finding] = {}
    for finding in sorted(findings, key=lambda found: (found.step, CHAIN.index(found.quantity))):
        first.setdefault(finding.quantity, finding)
    return list(first.values())


def invariant_findings(parity: Parity, tolerances: ComparisonConfig) -> list[Finding]:
    """What rounding cannot excuse."""
    if parity.unequal:
        names = ", ".join(parity.unequal)
        return [Finding("start", 1, math.inf, 0, f"{names} differ between the two before the first step")]
    if not parity.steps:
        return [Finding("start", 1, 0, 0, "no step was taken")]
    findings = []
    for at in parity.steps:
        if at.data is not None:
            findings.append(Finding("data order", at.step, math.inf, 0, at.data))
        apart = min(tolerances.adapter_rtol, APART * at.step)
        if at.workers_apart > apart:
            detail = f"the workers' adapters are {at.workers_apart:.2g} apart (relative) before the step"
            findings.append(Finding("adapter", at.step, at.workers_apart, apart, detail))
        if at.scored_tokens:
            detail = f"{abs(at.scored_tokens)} tokens {'more' if at.scored_tokens > 0 else 'fewer'} than the oracle"
            findings.append(Finding("scored tokens", at.step, at.scored_tokens, 0, detail))
        if not at.learning_rate <= EXACT_RATE:
            detail = f"the learning rate differs by {at.learning_rate:.2%}"
            findings.append(Finding("learning rate", at.step, at.learning_rate, EXACT_RATE, detail))
        findings += _not_finite(at)
    last = parity.steps[-1].step + 1
    if parity.applied is not None:
        findings.append(Finding("saved adapter", last, math.inf, 0, f"in adapter_config.json {parity.applied}"))
    if not math.isfinite(parity.adapter):
        findings.append(Finding("adapter", last, parity.adapter, 0, "the final adapter is NaN, inf, or zero in one"))
    return findings


def _not_finite(at: StepDifference) -> list[Finding]:
    values = {
        "score": max(at.score_chosen, at.score_rejected, key=lambda value: (math.isnan(value), value)),
        "loss": at.loss,
        "gradient norm": at.norm,
        "gradient direction": at.gradient or 0.0,
    }
    return [
        Finding(quantity, at.step, value, 0, "it is NaN or inf, or zero on one side only")
        for quantity, value in values.items()
        if not math.isfinite(value)
    ]
