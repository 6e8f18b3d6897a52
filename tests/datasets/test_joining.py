"""Parquet files joined without being read: every reader finds in the whole what was in the parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traceforge_core.datasets.joining import JoinedFile

SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("numbers", pa.list_(pa.int32())),
        ("share", pa.float64()),
        ("good", pa.bool_()),
        ("inner", pa.struct([("deep", pa.list_(pa.string()))])),
    ]
)
VALUES = st.fixed_dictionaries(
    {
        "name": st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        "numbers": st.none() | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9),
        "share": st.none() | st.floats(allow_nan=False),
        "good": st.none() | st.booleans(),
        "inner": st.none() | st.fixed_dictionaries({"deep": st.none() | st.lists(st.sampled_from("abc"), max_size=3)}),
    }
)
HOW = st.fixed_dictionaries(
    {
        "compression": st.sampled_from(["none", "zstd", "gzip"]),
        "use_dictionary": st.booleans(),
        "write_statistics": st.booleans(),
        "write_page_index": st.booleans(),
        "row_group_size": st.integers(1, 40),
        "data_page_version": st.sampled_from(["1.0", "2.0"]),
    }
)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.tuples(st.lists(VALUES, max_size=60), HOW), max_size=5))
def test_the_whole_has_the_rows_of_its_parts(
    parts: list[tuple[list[dict[str, Any]], dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("joined")
    rows, groups = [], 0
    with JoinedFile(folder / "whole.parquet", SCHEMA) as joined:
        for number, (own, how) in enumerate(parts):
            part = folder / f"{number}.parquet"
            pq.write_table(pa.Table.from_pylist(own, SCHEMA), part, **how)
            joined.append(part)
            rows += own
            groups += pq.ParquetFile(part).num_row_groups
    with pq.ParquetFile(folder / "whole.parquet", page_checksum_verification=True) as whole:
        assert whole.schema_arrow == SCHEMA
        assert (whole.metadata.num_rows, whole.num_row_groups) == (len(rows), groups)
        found = [row for n in range(whole.num_row_groups) for row in whole.read_row_group(n).to_pylist()]
    assert found == rows
    assert pq.read_table(folder / "whole.parquet", columns=["share"]).num_rows == len(rows)


def test_statistics_still_find_rows_by_their_values(tmp_path: Path) -> None:
    for number in range(3):
        names = [f"{number}-{n:02d}" for n in range(20)]
        pq.write_table(pa.table({"name": names}), tmp_path / f"{number}.parquet", write_page_index=True)
    with JoinedFile(tmp_path / "whole.parquet", pa.schema([("name", pa.string())])) as joined:
        for number in range(3):
            joined.append(tmp_path / f"{number}.parquet")
    assert pq.read_table(tmp_path / "whole.parquet", filters=[("name", ">", "2-17")])["name"].to_pylist() == [
        "2-18",
        "2-19",
    ]


def test_more_row_groups_than_fit_into_one_byte_are_counted_right(tmp_path: Path) -> None:
    table = pa.table({"n": list(range(40))})
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=1)
    with JoinedFile(tmp_path / "whole.parquet", table.schema) as joined:
        for _ in range(10):
            joined.append(tmp_path / "part.parquet")
    assert pq.read_table(tmp_path / "whole.parquet")["n"].to_pylist() == list(range(40)) * 10
    assert pq.ParquetFile(tmp_path / "whole.parquet").num_row_groups == 400


def test_other_columns_are_refused_and_an_error_leaves_no_file_that_reads(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "part.parquet")
    with pytest.raises(ValueError, match="other columns"):
        with JoinedFile(tmp_path / "whole.parquet", SCHEMA) as joined:
            joined.append(tmp_path / "part.parquet")
    with pytest.raises(pa.ArrowInvalid):
        pq.read_table(tmp_path / "whole.parquet")
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "part.parquet").read_bytes()[:-6])
    with pytest.raises((ValueError, pa.ArrowException)):
        with JoinedFile(tmp_path / "whole.parquet", pa.schema([("a", pa.int64())])) as joined:
            joined.append(tmp_path / "torn.parquet")
