"""Which held-out rows are taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from traceforge_core.datasets.parquet import SFT_SCHEMA, RowWriter
from traceforge_core.errors import TraceForgeError
from traceforge_core.evaluation.rows import ACTION_COLUMNS, count_rows, read_rows, spread


@pytest.mark.parametrize(("count", "at_most", "taken"), [(9, 3, [0, 3, 6]), (2, 5, [0, 1]), (0, 5, []), (5, 0, [])])
def test_rows_are_spread_evenly(count: int, at_most: int, taken: list[int]) -> None:
    assert spread(count, at_most) == taken


def test_rows_come_from_every_row_group_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traceforge_core.datasets.parquet.GROUP_ROWS", 4)
    path = tmp_path / "held_out.parquet"
    with RowWriter(path, SFT_SCHEMA) as writer:
        for number in range(10):
            texts = {name: str(number) for name in ("sample_id", "case", "trajectory_id", "prompt", "completion")}
            ids = {"input_ids": [number], "labels": [number]}
            writer.write(texts | ids | {"turn": number, "tokens": 1, "trimmed_messages": 0})
    assert [row["turn"] for row in read_rows(path, ACTION_COLUMNS, 5)] == [0, 2, 4, 6, 8]
    assert len(list(read_rows(path, ACTION_COLUMNS, 100))) == 10


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "held_out.parquet"
    path.write_text("not parquet", encoding="utf-8")
    with pytest.raises(TraceForgeError, match=r"Cannot read .*held_out\.parquet"):
        count_rows(path)
    assert count_rows(tmp_path / "nothing.parquet") == 0
