"""Whether a strategy computes the oracle's function, by fixed limits: in float32 rounding is far below any mistake.

verdict = judge_exactly(parity, config.comparison)
verdict.outcome, verdict.first                          # "fail", Finding(quantity="gradient norm", step=1, ...)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from traceforge_core.comparison.parity import Parity, StepDifference
from traceforge_core.comparison.verdict import Finding, Place, Verdict, failed, invariant_findings
from traceforge_core.config import ComparisonConfig

# A sketch gives distances to about 13%: this keeps what lies just within the limit from being called outside it.
SKETCH_MARGIN = 1.5
# From one step to the next, rounding in the weights may grow by so much (AdamW divides by small numbers) ...
GROWTH = 3.0
# ... and shows in single gradients by so many times its own relative size.
AMPLIFIED = 20.0
# float32 keeps a weight to 2^-24 of it, and a step rounds it a few times; measured are 3e-9 of the adapter a step.
ROUNDED = 2.0**-22
LED = "where AdamW leads with the run's own gradients"


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be at one step in float32. The tolerances are for numbers of size 1 and equal weights: a loss made of
    scores of 5 has coarser steps, and what the weights differ by already may show in everything after."""

    score: float
    loss: float
    gradient: float
    weights: float  # what the adapters may be apart before the step, next_weights after it
    next_weights: float
    unexplained: float  # the same, before or after, beyond what each run's gradients explain

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
            unexplained=SKETCH_MARGIN * min(tolerances.adapter_rtol, ROUNDED * step.step),
        )


def judge_exactly(parity: Parity, tolerances: ComparisonConfig) -> Verdict:
    """By the configured tolerances: right in float32, where two right computations agree to within them."""
    findings = exact_findings(parity, tolerances)
    if parity.unequal or not parity.steps:
        return failed(findings)
    limits = step_limits(parity, tolerances)
    rows = [
        ("loss, largest difference at any step", parity.max_loss, max(limit.loss for limit in limits)),
        *(
            (f"{name}, relative L2 difference", value, allowed)
            for name, value, allowed, _ in _last_rows(parity, limits)
        ),
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
        return f"within what float32 rounding explains, beyond the plain: {', '.join(beyond)}"
    plain = ", ".join(f"{name} {limit:g}" for name, (_, limit) in measured.items())
    return f"within the plain tolerances too, at every step ({plain})"


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
    after = parity.steps[-1].step + 1
    return findings + [
        Finding("adapter", after, value, allowed, detail)
        for _, value, allowed, detail in _last_rows(parity, limits)
        if not value <= allowed
    ]


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
    last = parity.steps[-1].step
    for name, value, allowed, detail in _last_rows(parity, limits):
        over = None if value <= allowed else last
        rows.append(Place("adapter", name, last, value, allowed, value / allowed, 1.0, over, detail))
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
    if at.unexplained is not None:
        what = f"the adapter is {at.unexplained:.2g} off (relative) from {LED}"
        rows.append(("adapter", at.unexplained, limit.unexplained, what))
    if at.weights is not None:
        rows.append(
            ("adapter", at.weights, limit.weights, f"the adapter is {at.weights:.2g} off (relative) before the step")
        )
    if at.direction is not None:
        what = f"the gradient of {at.direction_parameter} differs by {at.direction:.2g} (relative, of unit vectors)"
        rows.append(("gradient direction", at.direction, limit.gradient + at.explained, what))
    return rows


def _last_rows(parity: Parity, limits: list[Limits]) -> list[tuple[str, float, float, str]]:
    """What is measured of the final adapters: name, difference, what it may be, and the difference in words."""
    off = f"the final adapter is {parity.adapter:.2g} off (relative), most in {parity.adapter_parameter}"
    rows = [("final adapter", parity.adapter, limits[-1].next_weights, off)]
    if parity.unexplained is not None:
        off = f"the final adapter is {parity.unexplained:.2g} off (relative) from {LED}"
        rows.append(("final adapter beyond its own gradients", parity.unexplained, limits[-1].unexplained, off))
    return rows


def step_limits(parity: Parity, tolerances: ComparisonConfig) -> list[Limits]:
    """The float32 limits of every step."""
    limits: list[Limits] = []
    for step in parity.steps:
        limits.append(Limits.at(step, limits[-1] if limits else None, tolerances))
    return limits
