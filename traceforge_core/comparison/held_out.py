"""The report's part on held-out data: a strategy that agrees with a broken oracle is still broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from traceforge_core.comparison.document import Bullets, Heading, Part, Table, Text

# Adapters that agree to 1e-5 in float32 score held-out pairs alike to within this, relative.
SAME_SCORE = 1e-3


def held_out_parts(
    evaluation: Mapping[str, Any] | None, oracle: Mapping[str, Any], agreeing: Sequence[str]
) -> list[Part]:
    """A table with a row a model, and what of it is worth a word. `evaluation`: what the stage evaluate left. `oracle`:
    its training.json. `agreeing`: strategies whose verdict is pass."""
    models = (evaluation or {}).get("models") or {}
    if not models:
        return []
    rows = []
    for name, figures in models.items():
        pairs, actions = figures.get("pairs") or {}, figures.get("actions") or {}
        values = [pairs.get(key) for key in ("accuracy", "margin", "score_chosen", "score_rejected")]
        values += [pairs.get("length_correlation"), actions.get("loss"), actions.get("token_accuracy")]
        rows.append([name, *("-" if value is None else f"{value:.4g}" for value in values)])
    header = ["model", "accuracy", "margin", "ā chosen", "ā rejected", "length correlation", "action loss"]
    parts: list[Part] = [Heading("On held-out data"), Table([*header, "token accuracy"], rows)]
    cut_to = oracle.get("cut_to")
    warnings = _made_worse(models)
    if cut_to is None and oracle["dtype"] == "float32":
        warnings += _saved_otherwise(models, agreeing)
    elif cut_to is not None and "oracle" in models:
        parts.append(
            Text(
                f"The oracle was trained on pairs cut to {cut_to} tokens, on which the others were compared with it; "
                "their own training took whole pairs. So its figures here need not be theirs."
            )
        )
    if warnings:
        parts.append(Bullets(warnings))
    return parts


def _made_worse(models: Mapping[str, Any]) -> list[str]:
    """What training made worse than it found it, in words."""
    start = "sft" if "sft" in models else "base"
    before = (models.get(start) or {}).get("pairs") or {}
    told = []
    for name in ("oracle", "branch_parallel", "shared_prefix"):
        after = (models.get(name) or {}).get("pairs") or {}
        if before and after and after["margin"] < before["margin"]:
            told.append(
                f"{name} has a smaller margin on held-out pairs ({after['margin']:.4g}) than {start}, from which it "
                f"started ({before['margin']:.4g}): agreeing with the oracle does not make it better."
            )
    return told


def _saved_otherwise(models: Mapping[str, Any], agreeing: Sequence[str]) -> list[str]:
    """Strategies whose weights are the oracle's, and whose scores on held-out pairs are not."""
    told = []
    theirs = (models.get("oracle") or {}).get("pairs") or {}
    for name in agreeing:
        own = (models.get(name) or {}).get("pairs") or {}
        for figure in ("score_chosen", "score_rejected") if own and theirs else ():
            if abs(own[figure] - theirs[figure]) > SAME_SCORE * max(1.0, abs(theirs[figure])):
                what = figure.replace("_", " ")
                told.append(
                    f"{name} has weights that agree with the oracle's and another {what} on held-out pairs "
                    f"({own[figure]:.4g}, the oracle {theirs[figure]:.4g}): compare what lies beside the weights, "
                    "`adapter/adapter_config.json`."
                )
                break
    return told
