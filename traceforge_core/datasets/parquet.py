"""Datasets on disk: rows written one by one, in groups small enough that memory stays flat.

with RowWriter(out_dir / "sft" / "train.parquet", SFT_SCHEMA) as writer:
    writer.write({"sample_id": ..., ...})
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

IDS = pa.list_(pa.int32())
SFT_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("case", pa.string()),
        ("trajectory_id", pa.string()),
        ("turn", pa.int32()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("input_ids", IDS),
        ("labels", IDS),
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
        ("prompt_ids", IDS),
        ("chosen_ids", IDS),
        ("rejected_ids", IDS),
        ("chosen_mask", pa.list_(pa.int8())),
        ("rejected_mask", pa.list_(pa.int8())),
        ("chosen_trajectory", pa.string()),
        ("rejected_trajectory", pa.string()),
    ]
)
GROUP_ROWS = 1000
GROUP_VALUES = 4_000_000
"""Tokens and characters in a row group, at most about: some tens of megabytes."""


REPEATED = ("case", "trajectory_id", "miner", "tools", "chosen_trajectory", "rejected_trajectory")
"""Columns whose values come again and again. A dictionary of the others would be built only to be given up."""


class RowWriter:
    """Writes one file, Parquet or (for a name that ends in .arrow) Arrow's own format, which one process reads as fast
    as another can write it. The file is there, with no rows, even where none is written."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = 0
        self._schema = schema
        self._file: Any
        if path.suffix == ".arrow":
            self._file = pa.ipc.new_file(str(path), schema, options=pa.ipc.IpcWriteOptions(compression="lz4"))
        else:
            repeated = [name for name in schema.names if name in REPEATED]
            self._file = pq.ParquetWriter(
                path, schema, compression="zstd", compression_level=1, use_dictionary=repeated
            )
        self._pending: list[dict[str, Any]] = []
        self._values = 0

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._flush()
        self._file.close()

    def write(self, row: dict[str, Any]) -> None:
        """Add one row with the schema's columns; lists may be numpy arrays."""
        self._pending.append(row)
        self._values += sum(len(value) for value in row.values() if not isinstance(value, int | float))
        self.rows += 1
        if len(self._pending) >= GROUP_ROWS or self._values >= GROUP_VALUES:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        columns = [pa.array([row[field.name] for row in self._pending], type=field.type) for field in self._schema]
        self._file.write_table(pa.Table.from_arrays(columns, schema=self._schema))
        self._pending = []
        self._values = 0
