"""Datasets on disk: rows written one by one, in groups small enough that memory stays flat.

with RowWriter(out_dir / "sft" / "train.parquet", SFT_SCHEMA) as writer:
    writer.write({"sample_id": ..., ...})
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

IDS = pa.list_(pa.field("element", pa.int32(), nullable=False))
MASK = pa.list_(pa.field("element", pa.int8(), nullable=False))


def _list(name: str, kind: pa.ListType) -> pa.Field:
    """A column of lists, where none is missing: the format then keeps no record of what is."""
    return pa.field(name, kind, nullable=False)


SFT_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("case", pa.string()),
        ("trajectory_id", pa.string()),
        ("turn", pa.int32()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        _list("input_ids", IDS),
        _list("labels", IDS),
        ("tokens", pa.int32()),
        ("trimmed_messages", pa.int32()),
    ]
)
PREFERENCE_SCHEMA = pa.schema(
    [
        ("pair_id", pa.string()),
        ("case", pa.string()),
        ("miner", pa.string()),
        ("prompt", pa.string()),
        ("chosen", pa.string()),
        ("rejected", pa.string()),
        ("tools", pa.string()),
        _list("prompt_ids", IDS),
        _list("chosen_ids", IDS),
        _list("rejected_ids", IDS),
        _list("chosen_mask", MASK),
        _list("rejected_mask", MASK),
        ("chosen_trajectory", pa.string()),
        ("rejected_trajectory", pa.string()),
    ]
)
GROUP_ROWS = 1000
GROUP_VALUES = 16_000_000
"""Tokens and characters in a row group, at most about: some tens of megabytes."""
REPEATED = ("case", "trajectory_id", "miner", "tools", "chosen_trajectory", "rejected_trajectory")
"""Columns whose values come again and again. A dictionary of the others would be built only to be given up, and nobody
looks for the least and greatest of them."""


class RowWriter:
    """Writes one Parquet file. It is there, with no rows, even where none is written."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = 0
        self._schema = schema
        self._file = _open(path, schema)
        self._columns = [_Lists(f.type) if pa.types.is_list(f.type) else _Values(f.type) for f in schema]
        self._pending = self._values = 0

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._flush()
        self._file.close()

    def write(self, row: dict[str, Any]) -> None:
        """Add one row with the schema's columns. Lists may be numpy arrays, or tuples of such that are to be joined;
        they are copied."""
        for name, column in zip(self._schema.names, self._columns, strict=True):
            self._values += column.add(row[name])
        self.rows += 1
        self._pending += 1
        if self._pending >= GROUP_ROWS or self._values >= GROUP_VALUES:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            arrays = [column.take() for column in self._columns]
            self._file.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
            self._pending = self._values = 0


def select_rows(path: Path, wanted: Sequence[bool], out: Path) -> None:
    """Write the rows of a file of these that are `wanted` to another."""
    with pq.ParquetFile(path) as file, _open(out, file.schema_arrow) as kept:
        row = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            mask = wanted[row : row + rows]
            row += rows
            if any(mask):
                kept.write_table(file.read_row_group(group).filter(pa.array(mask, pa.bool_())))


def _open(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    repeated = [name for name in schema.names if name in REPEATED]
    # The bytes of an id apart, first all of the lowest: the others hardly change. Smaller, and faster to compress.
    split = {f"{field.name}.list.element": "BYTE_STREAM_SPLIT" for field in schema if field.type == IDS}
    how: dict[str, Any] = {"use_dictionary": repeated, "write_statistics": repeated, "column_encoding": split}
    return pq.ParquetWriter(path, schema, compression="zstd", compression_level=1, **how)


class _Values:
    """A column of single values."""

    def __init__(self, kind: pa.DataType) -> None:
        self._kind = kind
        self._values: list[Any] = []

    def add(self, value: Any) -> int:
        """Add one value. Returns its characters, if it has any."""
        self._values.append(value)
        return len(value) if isinstance(value, str) else 0

    def take(self) -> pa.Array:
        """The values added since the last time."""
        values, self._values = self._values, []
        return pa.array(values, self._kind)


class _Lists:
    """A column of lists of numbers, one behind the other in memory that is used again for every row group: fresh memory
    for each list costs more than all else that is done with it."""

    def __init__(self, kind: pa.ListType) -> None:
        self._kind = kind
        self._numbers = np.empty(1 << 16, kind.value_type.to_pandas_dtype())
        self._ends = [0]

    def add(self, value: Any) -> int:
        """Add one list. Returns its length."""
        parts = value if isinstance(value, tuple) else (np.asarray(value, self._numbers.dtype),)
        start = self._ends[-1]
        end = start + sum(map(len, parts))
        if end > len(self._numbers):
            more = np.empty(max(end, 2 * len(self._numbers)), self._numbers.dtype)
            more[:start] = self._numbers[:start]
            self._numbers = more
        np.concatenate(parts, out=self._numbers[start:end])
        self._ends.append(end)
        return end - start

    def take(self) -> pa.Array:
        """The lists added since the last time, until the next is added."""
        ends, self._ends = pa.array(self._ends, pa.int32()), [0]
        return pa.ListArray.from_arrays(ends, pa.array(self._numbers[: ends[-1].as_py()]), self._kind)
