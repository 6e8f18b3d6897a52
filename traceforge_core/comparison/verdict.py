"""Whether a strategy computes the oracle's function, and if not, what is wrong first.

    verdict = judge_exactly(parity, config.comparison)      # float32, where rounding is far below any mistake
    verdict.outcome, verdict.first                          # "fail", Finding(quantity="gradient norm", step=1, ...)

A step is a chain: weights and pairs give scores, these the loss, this the gradients, these and the rate the next
weights. Whatever is wrong makes everything after it wrong too, so a report names the earliest step at which anything
leaves its limit and, in that step, the first link of the chain that does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

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
    "masked or not summed.",
    "gradient norm": "The gradient points the right way but has another length: look at SUM against MEAN, loss scale "
    "and clipping before the sum.",
    "learning rate": "The step was taken with another rate: look at the schedule and its number of steps.",
}
EXACT_RATE = 1e-9
# A sketch gives distances to about 13%: this keeps what lies just within the limit from being called outside it.
SKETCH_MARGIN = 1.5
# From one step to the next, rounding in the weights may grow by so much (AdamW divides by small numbers) ...
GROWTH = 3.0
# ... and shows in single gradients by so many times its own relative size.
AMPLIFIED = 20.0


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


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be at one step in float32. The tolerances are for numbers of size 1 and equal weights: a loss made of
    scores of 5 has coarser steps, and what the weights differ by already may show in everything after."""

    score: float
    loss: float
    gradient: float
    weights: float
    next_weights: float

    @classmethod
    def at(cls, step: StepDifference, before: Limits | None, tolerances: ComparisonConfig) -> Limits:
        inherited = step.weights or 0.0
        size = max(1.0, step.size)
        from_weights = inherited * step.reach
        return cls(
            score=2 * tolerances.loss_atol * size + from_weights,
            loss=tolerances.loss_atol * size + from_weights,
            # The gradient of A is proportional to B: small as B is in the beginning, all of A's gradient may be off by
            # as much as B is.
            gradient=tolerances.gradient_rtol + AMPLIFIED * max(inherited, step.weights_b or 0.0),
            weights=SKETCH_MARGIN * (before.next_weights if before else tolerances.adapter_rtol),
            next_weights=tolerances.adapter_rtol + GROWTH * inherited + step.turned,
        )


def judge_exactly(parity: Parity, tolerances: ComparisonConfig) -> Verdict:
    """By the configured tolerances: right in float32, where two right computations agree to within them."""
    findings = exact_findings(parity, tolerances)
    if parity.unequal or not parity.steps:
        return failed(findings)
    limits = step_limits(parity, tolerances)
    rows = [
        ("loss, largest difference at any step", parity.max_loss, max(limit.loss for limit in limits)),
        ("final adapter, relative L2 difference", parity.adapter, limits[-1].next_weights),
    ]
    if parity.max_gradient is not None:
        name = f"gradients of {parity.gradient_steps} steps, largest relative L2 difference of a parameter"
        rows.insert(1, (name, parity.max_gradient, max(limit.gradient for limit in limits)))
    reasons = [f"{name}: {value:.3g} (limit {limit:.3g})" for name, value, limit in rows]
    if parity.max_gradient is None:
        reasons.append("gradients were not saved (comparison.gradient_steps is 0): only their lengths were compared")
    places = exact_places(parity, limits)
    if findings:
        return replace(failed(findings, reasons), places=places)
    told = ["equal start, data, scored tokens and learning rates at every step", *reasons, _plainly(parity, tolerances)]
    return Verdict("pass", told, places=places)


def _plainly(parity: Parity, tolerances: ComparisonConfig) -> str:
    """Whether even the tolerances as configured are met, with no allowance for the size of the scores."""
    measured = {"loss": (parity.max_loss, tolerances.loss_atol), "adapter": (parity.adapter, tolerances.adapter_rtol)}
    if parity.max_gradient is not None:
        measured["gradient"] = (parity.max_gradient, tolerances.gradient_rtol)
    beyond = [f"{name} {value:.2g} (over {limit:g})" for name, (value, limit) in measured.items() if value > limit]
    if beyond:
        return f"within what float32 rounding explains at scores of this size, beyond the plain: {', '.join(beyond)}"
    plain = ", ".join(f"{name} {limit:g}" for name, (_, limit) in measured.items())
    return f"within the plain tolerances too, at every step ({plain})"


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
        if at.workers_apart > tolerances.adapter_rtol:
            detail = f"the workers' adapters are {at.workers_apart:.2g} apart (relative) before the step"
            findings.append(Finding("adapter", at.step, at.workers_apart, tolerances.adapter_rtol, detail))
        if at.scored_tokens:
            detail = f"{abs(at.scored_tokens)} tokens {'more' if at.scored_tokens > 0 else 'fewer'} than the oracle"
            findings.append(Finding("scored tokens", at.step, at.scored_tokens, 0, detail))
        if not at.learning_rate <= EXACT_RATE:
            detail = f"the learning rate differs by {at.learning_rate:.2%}"
            findings.append(Finding("learning rate", at.step, at.learning_rate, EXACT_RATE, detail))
        findings += _not_finite(at)
    if not math.isfinite(parity.adapter):
        last = parity.steps[-1].step + 1
        findings.append(Finding("adapter", last, parity.adapter, 0, "the final adapter is NaN, inf, or zero in one"))
    return findings


def exact_findings(parity: Parity, tolerances: ComparisonConfig) -> list[Finding]:
    """Every quantity at every step that is over its float32 tolerance."""
    findings = invariant_findings(parity, tolerances)
    if parity.unequal or not parity.steps:
        return findings
    limits = step_limits(parity, tolerances)
    for at, limit in zip(parity.steps, limits, strict=True):
        findings += [
            Finding(quantity, at.step, value, allowed, detail)
            for quantity, value, allowed, detail in _rows(at, limit)
            if value > allowed
        ]
    if parity.adapter > limits[-1].next_weights:
        detail = f"the final adapter is {parity.adapter:.2g} off (relative), most in {parity.adapter_parameter}"
        findings.append(Finding("adapter", parity.steps[-1].step + 1, parity.adapter, limits[-1].next_weights, detail))
    return findings


def exact_places(parity: Parity, limits: list[Limits]) -> list[Place]:
    """Every quantity where it comes closest to its float32 limit, in units of that limit."""
    found: dict[str, Place] = {}
    left: dict[str, int] = {}
    for at, limit in zip(parity.steps, limits, strict=True):
        for quantity, value, allowed, detail in _rows(at, limit):
            share = value / allowed
            if share > 1:
                left.setdefault(quantity, at.step)
            if quantity not in found or not share <= found[quantity].statistic:
                found[quantity] = Place(quantity, quantity, at.step, value, allowed, share, 1.0, None, detail)
    rows = [replace(place, left_at=left.get(quantity)) for quantity, place in found.items()]
    allowed, last = limits[-1].next_weights, parity.steps[-1].step
    over = None if parity.adapter <= allowed else last
    what = f"most in {parity.adapter_parameter}"
    rows.append(
        Place("adapter", "final adapter", last, parity.adapter, allowed, parity.adapter / allowed, 1.0, over, what)
    )
    return rows


def _rows(at: StepDifference, limit: Limits) -> list[tuple[str, float, float, str]]:
    """What is measured at a step: quantity, difference, what it may be, and the difference in words."""
    scores = {"chosen": at.score_chosen, "rejected": at.score_rejected}
    branch = max(scores, key=scores.__getitem__)
    rows = [
        ("score", scores[branch], limit.score, f"the {branch} score differs by {scores[branch]:.2g} nats"),
        ("loss", at.loss, limit.loss, f"the loss differs by {at.loss:.2g}"),
        ("gradient norm", at.norm, limit.gradient, f"the gradient's length differs by {at.norm:.2%}"),
    ]
    if at.weights is not None:
        rows.append(
            ("adapter", at.weights, limit.weights, f"the adapter is {at.weights:.2g} off (relative) before the step")
        )
    if at.direction is not None:
        what = f"the gradient of {at.direction_parameter} differs by {at.direction:.2g} (relative, of unit vectors)"
        rows.append(("gradient direction", at.direction, limit.gradient, what))
    return rows


def step_limits(parity: Parity, tolerances: ComparisonConfig) -> list[Limits]:
    """The float32 limits of every step."""
    limits: list[Limits] = []
    for step in parity.steps:
        limits.append(Limits.at(step, limits[-1] if limits else None, tolerances))
    return limits


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
