"""Parquet files put one behind the other as one, their columns copied as they are: nothing is decoded or packed again.

    with JoinedFile(out_dir / "sft" / "train.parquet", SFT_SCHEMA) as joined:
        for part in parts:
            joined.append(part)

So the processes that make the rows also encode and compress them, and who joins their files moves bytes only. What
changes is the footer, which says where each column lies: its row groups are the parts', moved by where the part begins.
The footer is one struct in Thrift's compact protocol (see parquet.thrift of the Parquet format), which is all that is
read and written here.
"""

from __future__ import annotations

import io
import os
import shutil
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

MAGIC = b"PAR1"
TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
# Field numbers of parquet.thrift.
NUM_ROWS, ROW_GROUPS = 3, 4  # FileMetaData
COLUMNS, GROUP_ROWS, GROUP_OFFSET, ORDINAL = 1, 3, 5, 7  # RowGroup
CHUNK_OFFSET, CHUNK_META, INDEX_OFFSETS = 2, 3, (4, 6)  # ColumnChunk
PAGE_OFFSETS, BLOOM_OFFSET = (9, 10, 11), 14  # ColumnMetaData

Fields = dict[int, tuple[int, Any]]
"""A Thrift struct: type and value by field number."""


class _List(NamedTuple):
    kind: int
    items: list[Any]


class JoinedFile:
    """Writes one Parquet file out of others that have the same schema. It is there, with no rows, even where none is
    appended; where an error leaves the block it has no footer, and no reader takes it."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with io.BytesIO() as empty:
            pq.write_table(schema.empty_table(), empty, store_schema=True)
            self._footer = _footer_of(empty)
        self._footer[ROW_GROUPS] = (LIST, _List(STRUCT, []))  # an empty file may have one of no rows
        self._schema = schema
        self._rows = 0
        self._file = path.open("wb")
        self._file.write(MAGIC)

    def __enter__(self) -> JoinedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._file:
            if kind is None:
                self._footer[NUM_ROWS] = (6, self._rows)
                footer = bytearray()
                _write_struct(self._footer, footer)
                self._file.write(footer + struct.pack("<I", len(footer)) + MAGIC)

    def append(self, part: Path) -> None:
        """Put the rows of another file behind those that are there. Raises ValueError where its schema is another."""
        with part.open("rb") as source:
            if (schema := pq.read_schema(part)) != self._schema:
                raise ValueError(f"{part} has other columns: {schema}")
            footer = _footer_of(source)
            groups: list[Fields] = footer[ROW_GROUPS][1].items
            shift = self._file.tell() - len(MAGIC)
            source.seek(len(MAGIC))
            shutil.copyfileobj(source, self._file, 1 << 20)
            self._file.seek(-(_footer_size(source) + 8), os.SEEK_END)
            self._file.truncate()
        for group in groups:
            _move(group, shift)
            self._rows += group[GROUP_ROWS][1]
        self._footer[ROW_GROUPS][1].items.extend(groups)


def _move(group: Fields, shift: int) -> None:
    """Say of a row group that it lies so many bytes further on."""
    group.pop(ORDINAL, None)  # its place in the part
    _shift(group, GROUP_OFFSET, shift)
    for chunk in group[COLUMNS][1].items:
        _shift(chunk, CHUNK_OFFSET, shift)
        for field in INDEX_OFFSETS:
            _shift(chunk, field, shift)
        meta = chunk[CHUNK_META][1]
        for field in (*PAGE_OFFSETS, BLOOM_OFFSET):
            _shift(meta, field, shift)


def _shift(fields: Fields, field: int, shift: int) -> None:
    if field in fields and fields[field][1]:  # 0 where a writer has nothing to say
        kind, offset = fields[field]
        fields[field] = (kind, offset + shift)


def _footer_size(file: Any) -> int:
    file.seek(-8, os.SEEK_END)
    size, magic = struct.unpack("<I4s", file.read(8))
    if magic != MAGIC:
        raise ValueError("the file does not end as a Parquet file does")
    return int(size)


def _footer_of(file: Any) -> Fields:
    size = _footer_size(file)
    file.seek(-(size + 8), os.SEEK_END)
    fields, _ = _read_struct(file.read(size), 0)
    return fields


def _read_struct(data: bytes, at: int) -> tuple[Fields, int]:
    fields: Fields = {}
    number = 0
    while head := data[at]:
        at += 1
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, at = _read_signed(data, at)
        if kind in (TRUE, FALSE):
            fields[number] = (kind, None)
        else:
            value, at = _read(kind, data, at)
            fields[number] = (kind, value)
    return fields, at + 1


def _read(kind: int, data: bytes, at: int) -> tuple[Any, int]:
    if kind == STRUCT:
        return _read_struct(data, at)
    if kind in (LIST, SET):
        head = data[at]
        size, at = (head >> 4, at + 1) if head >> 4 < 15 else _read_varint(data, at + 1)
        items = []
        for _ in range(size):
            item, at = _read(head & 15, data, at)
            items.append(item)
        return _List(head & 15, items), at
    if kind == BINARY:
        size, at = _read_varint(data, at)
        return data[at : at + size], at + size
    if kind == DOUBLE:
        return data[at : at + 8], at + 8
    if kind in (TRUE, FALSE, BYTE):  # in a list a boolean is a byte too
        return data[at], at + 1
    if kind == MAP:
        raise ValueError("a map in a Parquet footer")
    return _read_signed(data, at)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _read_signed(data: bytes, at: int) -> tuple[int, int]:
    value, at = _read_varint(data, at)
    return value >> 1 ^ -(value & 1), at


def _write_struct(fields: Fields, out: bytearray) -> None:
    last = 0
    for number, (kind, value) in sorted(fields.items()):
        if 0 < number - last < 16:
            out.append((number - last) << 4 | kind)
        else:
            out.append(kind)
            _write_signed(number, out)
        last = number
        if kind not in (TRUE, FALSE):
            _write(kind, value, out)
    out.append(0)


def _write(kind: int, value: Any, out: bytearray) -> None:
    if kind == STRUCT:
        _write_struct(value, out)
    elif kind in (LIST, SET):
        size = len(value.items)
        out.append(min(size, 15) << 4 | value.kind)
        if size >= 15:
            _write_varint(size, out)
        for item in value.items:
            _write(value.kind, item, out)
    elif kind == BINARY:
        _write_varint(len(value), out)
        out += value
    elif kind == DOUBLE:
        out += value
    elif kind in (TRUE, FALSE, BYTE):
        out.append(value)
    else:
        _write_signed(value, out)


def _write_varint(value: int, out: bytearray) -> None:
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def _write_signed(value: int, out: bytearray) -> None:
    _write_varint(value << 1 ^ value >> 63, out)
