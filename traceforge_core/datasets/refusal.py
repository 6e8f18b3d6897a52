"""Why datasets with nothing to train on are refused: what became of everything, and which setting or file mends it."""

from __future__ import annotations

from collections.abc import Mapping

from traceforge_core.config import DatasetsConfig
from traceforge_core.datasets.pairs import Surveyed
from traceforge_core.datasets.report import DatasetReport
from traceforge_core.errors import TraceForgeError, page


def refuse_empty(report: DatasetReport, records: list[Surveyed], settings: DatasetsConfig) -> None:
    """Raises TraceForgeError where no sample or no pair is left to train on."""
    if not report.counts["sft_train"]:
        raise TraceForgeError(
            f"No SFT sample to train on came out of {len(records)} trajectories"
            f"{_reasons(report.dropped_samples)}. "
            + (
                "datasets.sft.outcomes=resolved takes only runs known to have solved their case: name their outcome "
                "files with ingest.outcomes, or set it to all."
                if settings.sft.outcomes == "resolved"
                else "Raise datasets.sft.max_length if samples are too long; check ingest's report for what was read."
            )
        )
    if report.counts["pairs_train"]:
        return
    if report.counts["pairs_held_out"]:
        raise TraceForgeError(
            f"All {report.counts['pairs_held_out']} preference pairs belong to held-out cases, so none is left to "
            "train on. Lower datasets.split.held_out or change datasets.split.seed."
        )
    labelled = {label: sum(record.outcome == label for record in records) for label in ("resolved", "unresolved", None)}
    tried = ", ".join(f"{miner}: {report.candidates[miner]}" for miner in settings.preference.miners)
    advice = "Raise datasets.preference.max_length if pairs are too long."
    if not sum(report.candidates.values()):
        advice = (
            "Outcome pairs need a resolved and an unresolved run of one case with the same system and user text: name "
            "outcome files (SWE-bench run reports) with ingest.outcomes. Recovery pairs need a failed command and a "
            "later one of the same kind that worked. Or give ready pairs with datasets.preference.given."
        )
    pages = page("no-pairs") + (f" {page('pairs-too-long')}" if report.dropped_pairs.get("too long") else "")
    raise TraceForgeError(
        f"No preference pairs were found in {len(records)} trajectories ({labelled['resolved']} resolved, "
        f"{labelled['unresolved']} unresolved, {labelled[None]} without a label). Candidates by miner: {tried}"
        f"{_reasons(report.dropped_pairs)}. {advice} {pages}"
    )


def _reasons(dropped: Mapping[str, int]) -> str:
    shown = [f"{reason}: {count}" for reason, count in sorted(dropped.items()) if count]
    return f"; dropped: {', '.join(shown)}" if shown else ""
