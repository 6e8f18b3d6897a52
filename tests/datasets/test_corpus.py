"""Trajectories by number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from traceforge_core.datasets import corpus as corpus_module
from traceforge_core.datasets.corpus import Corpus
from traceforge_core.trajectories import store
from traceforge_core.trajectories.model import Trajectory


def test_any_order_of_access_gives_what_iteration_gives(
    monkeypatch: pytest.MonkeyPatch, make_run: Callable[..., Trajectory], ingested: Callable[[list[Trajectory]], Path]
) -> None:
    monkeypatch.setattr(store, "ROW_GROUP_BYTES", 2000)
    monkeypatch.setattr(store, "PART_BYTES", 6000)
    monkeypatch.setattr(corpus_module, "GROUPS_KEPT", 2)
    runs = [make_run(f"case{n}", "r", [("ls", 0)] * (1 + n % 4)) for n in range(30)]
    corpus = Corpus(ingested(runs))
    assert corpus.count == 30
    assert len(corpus._groups) > 5
    assert list(corpus) == runs
    for number in [29, 0, 15, 14, 15, 3, 28]:
        assert corpus.at(number) == runs[number]
    for number in (-1, 30):
        with pytest.raises(IndexError):
            corpus.at(number)
