"""Canonical trajectories at rest: Parquet parts that are written and read as a stream.

    with TrajectoryWriter(out_dir / "trajectories") as writer:
        writer.write(trajectory)
    for trajectory in read_trajectories(out_dir):
        ...

Messages, tools and left-out counts are JSON text, because an Arrow column of arguments would give every tool call the
keys of all the others, and refuses mixed types. The same trajectories in the same order give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from traceforge_core.errors import TraceForgeError
from traceforge_core.trajectories.model import Action, Message, Trajectory

FOLDER = "trajectories"
ROW_GROUP_BYTES = 8 << 20
PART_BYTES = 256 << 20
_TEXT_COLUMNS = ("trajectory_id", "case", "run", "format", "source")
_MAYBE_COLUMNS = ("outcome", "outcome_source", "exit_status", "model")
_JSON_COLUMNS = ("messages", "tools", "left_out")
SCHEMA = pa.schema([pa.field(name, pa.string()) for name in _TEXT_COLUMNS + _MAYBE_COLUMNS + _JSON_COLUMNS])


class TrajectoryWriter:
    """Writes trajectories into `part-00000.parquet`, `part-00001.parquet`, ... in the order given.

    Holds at most one row group (about 8 MB of text) in memory. Closing a writer without trajectories leaves one empty
    part, so that a reader can tell "none" from "not there".
    """

    def __init__(self, folder: Path, first_part: int = 0, one_part: bool = False) -> None:
        self.folder = folder
        self.next_part = first_part
        self._part_limit = None if one_part else PART_BYTES
        self._empty = True
        self._file: pq.ParquetWriter | None = None
        self._rows: list[dict[str, str | None]] = []
        self._group_bytes = 0
        self._part_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Write what is still in memory and finish the part."""
        self._flush()
        if self._empty:
            self._open()
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, trajectory: Trajectory, messages: bytes | None = None) -> None:
        """Add one trajectory; `messages` is `encode_messages(trajectory.messages)` where the caller has it already."""
        encoded = encode_messages(trajectory.messages) if messages is None else messages
        row: dict[str, str | None] = {name: getattr(trajectory, name) for name in _TEXT_COLUMNS + _MAYBE_COLUMNS}
        row["messages"] = encoded.decode()
        row["tools"] = orjson.dumps(trajectory.tools).decode()
        row["left_out"] = orjson.dumps(trajectory.left_out, option=orjson.OPT_SORT_KEYS).decode()
        self.write_row(row)

    def write_row(self, row: dict[str, str | None]) -> None:
        """Add one row as `read_rows` gives it."""
        self._rows.append(row)
        self._group_bytes += len(row["messages"] or "") + 200
        if self._group_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _open(self) -> pq.ParquetWriter:
        if self._file is None:
            path = self.folder / f"part-{self.next_part:05d}.parquet"
            self._file = pq.ParquetWriter(path, SCHEMA, compression="zstd", compression_level=1, use_dictionary=False)
            self.next_part += 1
            self._part_bytes = 0
            self._empty = False
        return self._file

    def _flush(self) -> None:
        if not self._rows:
            return
        table = pa.Table.from_pylist(self._rows, schema=SCHEMA)
        self._open().write_table(table, row_group_size=len(self._rows))
        self._part_bytes += self._group_bytes
        self._rows = []
        self._group_bytes = 0
        if self._part_limit is not None and self._part_bytes >= self._part_limit and self._file is not None:
            self._file.close()
            self._file = None


def read_trajectories(ingest_dir: Path) -> Iterator[Trajectory]:
    """The trajectories of a finished ingest, in the order in which they were written, one row group in memory at a
    time.

    Raises TraceForgeError where the folder holds none of the files.
    """
    parts = sorted((ingest_dir / FOLDER).glob("part-*.parquet"))
    if not parts:
        raise TraceForgeError(f"There are no trajectories in {ingest_dir / FOLDER}. Run the ingest stage first.")
    for row in read_rows(parts):
        yield trajectory_of(row)


def trajectory_of(row: dict[str, str | None]) -> Trajectory:
    """The trajectory that one row of a part holds."""
    return Trajectory(
        **{name: row[name] for name in _TEXT_COLUMNS + _MAYBE_COLUMNS},  # type: ignore[arg-type]
        messages=decode_messages(row["messages"] or "[]"),
        tools=orjson.loads(row["tools"] or "[]"),
        left_out=orjson.loads(row["left_out"] or "{}"),
    )


def read_rows(parts: Iterable[Path]) -> Iterator[dict[str, str | None]]:
    """The rows of Parquet parts, as text."""
    for part in parts:
        with pq.ParquetFile(part) as file:
            for group in range(file.num_row_groups):
                yield from file.read_row_group(group).to_pylist()


def encode_messages(messages: list[Message]) -> bytes:
    """Messages as JSON text, without the fields that have their default. Canonical: equal messages, equal bytes."""
    return orjson.dumps([_message_row(message) for message in messages], option=orjson.OPT_NON_STR_KEYS)


def decode_messages(text: str | bytes) -> list[Message]:
    """The inverse of `encode_messages`."""
    return [
        Message(**{**row, "actions": [Action(**action) for action in row.get("actions", ())]})
        for row in orjson.loads(text)
    ]


def _message_row(message: Message) -> dict[str, Any]:
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        row["reasoning"] = message.reasoning
    if message.actions:
        row["actions"] = [_action_row(action) for action in message.actions]
    if message.call_id is not None:
        row["call_id"] = message.call_id
    if message.returncode is not None:
        row["returncode"] = message.returncode
    if not message.trainable:
        row["trainable"] = False
    return row


def _action_row(action: Action) -> dict[str, Any]:
    row: dict[str, Any] = {"name": action.name, "arguments": action.arguments}
    if action.call_id is not None:
        row["call_id"] = action.call_id
    if action.in_text:
        row["in_text"] = True
    return row
