"""Held-out rows of a datasets folder, as many as asked for, spread evenly over the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from traceforge_core.errors import TraceForgeError

PAIR_COLUMNS = (
    "pair_id",
    "case",
    "miner",
    "prompt_ids",
    "chosen_ids",
    "rejected_ids",
    "chosen_mask",
    "rejected_mask",
)
ACTION_COLUMNS = ("sample_id", "case", "turn", "input_ids", "labels")


def pairs_file(datasets: Path) -> Path:
    return datasets / "preference" / "held_out.parquet"


def actions_file(datasets: Path) -> Path:
    return datasets / "sft" / "held_out.parquet"


def count_rows(path: Path) -> int:
    """Rows of a Parquet file; 0 where it is not there. Raises TraceForgeError where it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        return 0
    try:
        rows: int = pq.read_metadata(path).num_rows
        return rows
    except (OSError, pa.ArrowException) as error:
        raise TraceForgeError(f"Cannot read {path}: {error}. Run the stage datasets again.") from None


def read_rows(path: Path, columns: Sequence[str], at_most: int) -> Iterator[dict[str, Any]]:
    """At most so many rows, in the file's order, evenly spread, one row group in memory at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = spread(count_rows(path), at_most)
    if not wanted:
        return
    try:
        file = pq.ParquetFile(path)
        start = 0
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            here = [index - start for index in wanted if start <= index < start + size]
            if here:
                yield from file.read_row_group(group, columns=list(columns)).take(here).to_pylist()
            start += size
    except (OSError, pa.ArrowException, KeyError) as error:
        raise TraceForgeError(
            f"Cannot read {path}: {error}. Name a folder that the stage datasets has written."
        ) from None


def spread(count: int, at_most: int) -> list[int]:
    """Positions of at most `at_most` of `count` things, as even as can be."""
    taken = min(count, at_most)
    return [index * count // taken for index in range(taken)]
