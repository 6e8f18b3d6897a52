"""Pairs as the trainers see them, whole and cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.conftest import random_pairs, write_pairs
from traceforge_core.errors import TraceForgeError
from traceforge_core.training.pairs import IGNORED, PairDataset


@pytest.mark.parametrize("cut_to", [8, 17, 40])
def test_cut_pairs_still_share_their_prompt_and_fit(inputs: dict[str, Path], cut_to: int) -> None:
    path = inputs["datasets"] / "preference" / "train.parquet"
    whole, cut = PairDataset(path), PairDataset(path, cut_to=cut_to)
    assert cut.longest() <= cut_to < whole.longest()
    for before, after in zip(whole, cut, strict=True):
        prompt = after["prompt_input_ids"]
        assert before["prompt_input_ids"][-len(prompt) :] == prompt
        for branch in ("chosen", "rejected"):
            ids, labels = after[f"{branch}_input_ids"], after[f"{branch}_labels"]
            assert ids[: len(prompt)] == prompt
            assert len(ids) == len(labels) and any(label != IGNORED for label in labels)
            assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))


@pytest.mark.parametrize(
    ("row", "cut_to", "told"),
    [
        pytest.param(
            {"chosen_ids": [5] * 12, "chosen_mask": [0] * 8 + [1] * 4},
            16,
            r"pair-0 .*chosen completion, cut to 8 tokens, counts .*Raise comparison\.oracle_max_length",
            id="what counts is cut off",
        ),
        pytest.param(
            {"prompt_ids": [], "rejected_ids": [5], "rejected_mask": [1]},
            None,
            r"pair-0 .*no token of its rejected completion counts .*Build the datasets again",
            id="nothing predicts the only token",
        ),
    ],
)
def test_a_pair_without_a_score_is_named_before_anything_is_trained(
    row: dict[str, list[int]], cut_to: int | None, told: str, tmp_path: Path
) -> None:
    write_pairs(tmp_path / "pairs.parquet", [random_pairs(1)[0] | row])
    with pytest.raises(TraceForgeError, match=told):
        PairDataset(tmp_path / "pairs.parquet", cut_to=cut_to)


def test_another_cut_is_other_data(inputs: dict[str, Path]) -> None:
    path = inputs["datasets"] / "preference" / "train.parquet"
    assert len({PairDataset(path, cut_to=cut).fingerprint() for cut in (None, 8, 17)}) == 3
