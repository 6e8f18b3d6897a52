"""Pairs as the trainers see them, whole and cut."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_another_cut_is_other_data(inputs: dict[str, Path]) -> None:
    path = inputs["datasets"] / "preference" / "train.parquet"
    assert len({PairDataset(path, cut_to=cut).fingerprint() for cut in (None, 8, 17)}) == 3
