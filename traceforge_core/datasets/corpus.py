"""The trajectories of a finished ingest, in order or one by number, without holding the corpus in memory.

corpus = Corpus(run / "ingest")
for trajectory in corpus: ...
corpus.at(17)              # the 18th of them
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from traceforge_core.trajectories.model import Trajectory
from traceforge_core.trajectories.store import FOLDER, read_trajectories, trajectory_of

GROUPS_KEPT = 16
"""Row groups kept at hand (about 8 MB of text each): runs of the same cases lie in as many places as there are runs."""


class Corpus:
    """Random access by row group. Raises TraceForgeError (on iterating) where the folder holds no trajectories."""

    def __init__(self, ingest_dir: Path, groups_kept: int = GROUPS_KEPT) -> None:
        self.ingest_dir = ingest_dir
        self._groups_kept = groups_kept
        self._groups: list[tuple[Path, int]] = []
        self._firsts: list[int] = []
        self._cache: OrderedDict[int, pa.Table] = OrderedDict()
        self.count = 0
        for part in sorted((ingest_dir / FOLDER).glob("part-*.parquet")):
            with pq.ParquetFile(part) as file:
                for group in range(file.num_row_groups):
                    self._groups.append((part, group))
                    self._firsts.append(self.count)
                    self.count += file.metadata.row_group(group).num_rows

    def __iter__(self) -> Iterator[Trajectory]:
        return read_trajectories(self.ingest_dir)

    def at(self, number: int) -> Trajectory:
        """The trajectory at position `number` in iteration order. Raises IndexError outside of 0 .. count - 1."""
        if not 0 <= number < self.count:
            raise IndexError(number)
        group = bisect_right(self._firsts, number) - 1
        table = self._cache.get(group)
        if table is None:
            part, within = self._groups[group]
            with pq.ParquetFile(part) as file:
                table = file.read_row_group(within)
            self._cache[group] = table
            while len(self._cache) > self._groups_kept:
                self._cache.popitem(last=False)
        self._cache.move_to_end(group)
        return trajectory_of(table.slice(number - self._firsts[group], 1).to_pylist()[0])
