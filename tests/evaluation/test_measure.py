"""Scores against a plain computation over full logits, and figures against the formulas done by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from traceforge_core.config import ModelConfig
from traceforge_core.evaluation import measure
from traceforge_core.evaluation.measure import ActionScore, PairScore
from traceforge_core.modeling.loading import load_model


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path, make_adapter: Callable[..., Path]) -> Any:
    options = {"device": "cpu", "backend": "transformers", "max_length": 64, "gradient_checkpointing": False}
    loaded, _ = load_model(tiny_model_dir, ModelConfig(), adapter=make_adapter(scale=0.3), seed=0, **options)
    return loaded.eval()


def plain_logps(model: Any, ids: list[int]) -> torch.Tensor:
    """log p(ids[i] | ids[:i]) for i = 1, 2, ... from the whole logits."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize("block", [3, 1024])
def test_log_probabilities_of_chosen_positions_are_those_of_the_full_computation(
    model: Any, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "BLOCK", block)
    ids = torch.randint(0, 200, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    positions = [1, 7, 8, 9, 20, 33]
    logps, likeliest = measure.token_logps(model, ids, positions)
    assert logps.dtype == torch.float32
    wanted = plain_logps(model, ids)[[position - 1 for position in positions]]
    torch.testing.assert_close(logps.double(), wanted, rtol=0, atol=1e-5)
    with torch.no_grad():
        best = model(input_ids=torch.tensor([ids])).logits[0].argmax(-1)
    assert likeliest.tolist() == [best[position - 1].item() == ids[position] for position in positions]


def test_only_the_logits_that_are_scored_are_computed(model: Any) -> None:
    shapes = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda _m, _i, output: shapes.append(tuple(output.shape))
    )
    try:
        measure.token_logps(model, list(range(50)), [40, 41, 42])
    finally:
        hook.remove()
    assert [shape[1] for shape in shapes] == [3]


def test_a_pair_is_scored_on_tokens_that_count_and_on_no_others(model: Any) -> None:
    row = {
        "pair_id": "p",
        "case": "c",
        "miner": "outcome",
        "prompt_ids": [5, 6, 7],
        "chosen_ids": [10, 11, 12, 13],
        "chosen_mask": [1, 0, 0, 1],
        "rejected_ids": [20, 21],
        "rejected_mask": [1, 1],
    }
    score = measure.score_pair(model, row)
    chosen = plain_logps(model, row["prompt_ids"] + row["chosen_ids"])[[2, 5]].mean().item()
    rejected = plain_logps(model, row["prompt_ids"] + row["rejected_ids"])[[2, 3]].mean().item()
    assert score.chosen == pytest.approx(chosen, abs=1e-5)
    assert score.rejected == pytest.approx(rejected, abs=1e-5)
    assert (score.chosen_tokens, score.rejected_tokens) == (2, 2)


def test_an_action_counts_the_tokens_whose_label_is_set(model: Any) -> None:
    ids = [5, 6, 7, 8, 9, 10]
    score = measure.score_action(
        model, {"sample_id": "s", "case": "c", "input_ids": ids, "labels": [5, -100, -100, 8, 9, -100]}
    )
    # The first token of a sequence follows nothing, so it cannot be predicted.
    assert score.tokens == 2
    assert score.loss == pytest.approx(-plain_logps(model, ids)[[2, 3]].sum().item(), abs=1e-5)


def test_the_figures_of_pairs_follow_simpo() -> None:
    scores = [PairScore("a", "c", "m", -1.0, -2.0, 5, 9), PairScore("b", "c", "m", -3.0, -2.5, 8, 4)]
    figures = measure.pair_figures(scores, beta=2.0, gamma=0.5)
    assert figures["accuracy"] == 0.5
    assert figures["margin"] == pytest.approx(2.0 * (1.0 - 0.5) / 2)
    assert (figures["score_chosen"], figures["score_rejected"]) == (-2.0, -2.25)
    by_hand = [-math.log(1 / (1 + math.exp(-(2.0 * difference - 0.5)))) for difference in (1.0, -0.5)]
    assert figures["loss"] == pytest.approx(sum(by_hand) / 2)
    assert figures["length_correlation"] is None


def test_the_loss_of_next_actions_weighs_every_token_alike() -> None:
    figures = measure.action_figures([ActionScore("a", "c", 2.0, 1, 1), ActionScore("b", "c", 3.0, 9, 3)])
    assert figures["loss"] == pytest.approx(0.5)
    assert figures["token_accuracy"] == pytest.approx(0.4)
    assert figures["exact"] == 0.5


def test_a_model_whose_score_is_length_shows_a_correlation_of_one() -> None:
    scores = [PairScore("", "", "", -float(n), -10.0, 20 - n, 10) for n in range(1, 9)]
    assert measure.pair_figures(scores, 2.0, 0.5)["length_correlation"] == pytest.approx(1.0)


def test_an_extreme_margin_overflows_nothing() -> None:
    figures = measure.pair_figures([PairScore("", "", "", -1e5, 0.0, 1, 1)], beta=2.0, gamma=0.5)
    assert figures["loss"] == pytest.approx(2e5 + 0.5)
