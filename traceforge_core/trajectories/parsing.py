"""Bytes on disk to JSON values: compression, byte-order marks, torn lines, NaN and lone surrogates.

`orjson` reads what it can; what it refuses but Python's own parser takes (NaN, a lone surrogate escape) is read by that
and cleaned, because Arrow and tokenizers refuse it too.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import orjson
import zstandard

from traceforge_core.trajectories.formats.protocol import Unreadable

# A single JSON document or line above this is set aside: parsed, it would not fit into a worker's share of memory.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
DOCUMENT_LIMIT = 128 << 20
CHUNK_BYTES = 4 << 20
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError)
HEAD_BYTES = 4096
DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".traj", ".parquet")
PACKED_SUFFIXES = (".gz", ".zst")
_BRACKET_OR_QUOTE = re.compile(rb'["\[\]{}]')
_BETWEEN = b"\xef\xbb\xbf\x1e, \t\r\n"  # what may stand around documents: RFC 7464 begins each with a record separator
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def open_bytes(path: Path) -> IO[bytes]:
    """The file's bytes, unpacked where its first bytes say gzip or Zstandard."""
    file = path.open("rb")
    magic = file.peek(4)[:4]
    if magic[:2] == b"\x1f\x8b":
        file.close()
        return cast(IO[bytes], gzip.open(path))
    if magic == ZSTD_MAGIC:
        return io.BufferedReader(_ZstdReader(file), CHUNK_BYTES)
    return file


class _ZstdReader(io.RawIOBase):
    """The bytes of a Zstandard file of any number of frames. Unlike the library's own reader it raises EOFError where
    the file ends in the middle of one, so that a torn file is not taken for a short one."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._frame: Any = None
        self._packed = b""
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._file.read(1 << 17)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the file ends in the middle of a Zstandard frame")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._ready = self._frame.decompress(self._packed)
            self._packed = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def read_head(path: Path, size: int = HEAD_BYTES) -> bytes:
    """The first (unpacked) bytes of a file; b'' where it cannot be read, which reading it whole will report."""
    try:
        with open_bytes(path) as file:
            return file.read(size)
    except (OSError, *DAMAGED):
        return b""


def read_whole(path: Path) -> bytes:
    """All of a file, unpacked. Raises Unreadable where it cannot be read or is larger than one document may be."""
    try:
        with open_bytes(path) as file:
            data = file.read(DOCUMENT_LIMIT + 1)
            while 0 < len(data) <= DOCUMENT_LIMIT and (more := file.read(DOCUMENT_LIMIT + 1 - len(data))):
                data += more
    except DAMAGED as error:
        raise Unreadable("damaged_archive", str(error)) from None
    except OSError as error:
        raise Unreadable("cannot_read", error.strerror or str(error)) from None
    if len(data) > DOCUMENT_LIMIT:
        raise Unreadable(
            "too_large", f"one JSON document of more than {DOCUMENT_LIMIT >> 20} MiB; split it, or write JSONL"
        )
    return data


def parse(data: bytes) -> Any:
    """One JSON value. Raises Unreadable (`empty_file`, `not_utf8`, `invalid_json`, `git_lfs_pointer`)."""
    data = _as_utf8(data)
    if not data.strip():
        raise Unreadable("empty_file", "there is nothing in it")
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if data.startswith(LFS_POINTER):
            raise Unreadable("git_lfs_pointer", "the data itself is not there; run `git lfs pull`") from None
        return _parse_leniently(data, error)


def array_items(path: Path) -> Iterator[Any]:
    """The items of a JSON array that is too large to be parsed at once, one by one; an Unreadable in place of one that
    is no JSON.

    Raises Unreadable where the file is no array, ends in the middle, or holds an item above the limit.
    """
    with open_bytes(path) as file:
        head = file.read(CHUNK_BYTES).lstrip(_BETWEEN)
        if not head.startswith(b"["):
            raise Unreadable("too_large", f"one JSON document of more than {DOCUMENT_LIMIT >> 20} MiB; write JSONL")
        for piece in _pieces(file, head, 1):
            try:  # what stands between objects and arrays may be several plain values
                yield from [parse(piece)] if piece[:1] in (b"{", b"[") else parse(b"[" + piece + b"]")
            except Unreadable as problem:
                yield problem


def documents(path: Path) -> Iterator[Any]:
    """The JSON objects and arrays that stand one behind the other in a file, over however many lines each (what `jq .`
    writes); an Unreadable in place of one that is no JSON, of what else stands between them, and of a torn end."""
    with open_bytes(path) as file:
        try:
            for piece in _pieces(file, file.read(CHUNK_BYTES).lstrip(_BETWEEN), 0):
                try:
                    yield parse(piece)
                except Unreadable as problem:
                    yield problem
        except Unreadable as problem:
            yield problem


def _pieces(file: IO[bytes], buffer: bytes, level: int) -> Iterator[bytes]:
    """The bytes of each object and array that opens `level` brackets deep, and of what else stands between them.

    Only brackets and strings are looked at to find where one ends. Raises Unreadable where the file ends in the middle
    of one, a bracket closes nothing, or one is above the limit.
    """
    depth, start, position = 0, 0, 0
    while True:
        found = _BRACKET_OR_QUOTE.search(buffer, position)
        string_end = _STRING.match(buffer, found.start()) if found and found.group() == b'"' else None
        if found is None or (found.group() == b'"' and string_end is None):
            position = found.start() if found else len(buffer)
            if len(buffer) - start > DOCUMENT_LIMIT:
                raise Unreadable("too_large", f"a document or item of more than {DOCUMENT_LIMIT >> 20} MiB")
            more = file.read(max(CHUNK_BYTES, len(buffer) - start))
            if not more and (depth or level or found):
                raise Unreadable("invalid_json", f"the file ends in the middle of {'an array' if level else 'it'}")
            if not more:
                break
            buffer, start, position = buffer[start:] + more, 0, position - start
        elif string_end is not None:
            position = string_end.end()
        else:
            opens = found.group() in b"[{"
            if depth == level:
                if between := buffer[start : found.start()].strip(_BETWEEN):
                    yield between
                start = found.start()
            position = found.end()
            depth += 1 if opens else -1
            if depth == level:
                if not opens:
                    yield buffer[start:position]
                start = position
            elif depth < 0:
                raise Unreadable("invalid_json", "a bracket closes nothing")
            elif depth < level:
                return  # the end of the array
    if rest := buffer[start:].strip(_BETWEEN):
        yield rest


def _as_utf8(data: bytes) -> bytes:
    if data[:3] == b"\xef\xbb\xbf":
        return data[3:]
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):  # what a PowerShell redirect writes
        try:
            return data.decode("utf-16").encode()
        except UnicodeError as error:
            raise Unreadable("not_utf8", f"UTF-16 by its byte-order mark, but {error}") from None
    if len(data) > 1 and (data[0] == 0) != (data[1] == 0):
        raise Unreadable("not_utf8", "UTF-16 without a byte-order mark; convert it to UTF-8")
    return data


def _parse_leniently(data: bytes, error: orjson.JSONDecodeError) -> Any:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise Unreadable("not_utf8", f"byte {fault.start}: {fault.reason}") from None
    try:
        value = json.loads(text)
        return _clean(value)
    except json.JSONDecodeError as fault:
        more = ""
        if fault.pos >= len(text.rstrip()) - 1:
            more = " (the file ends in the middle of it)"
        elif fault.msg == "Extra data":
            more = " (something follows the document; several of them must stand one a line, as `jq -c .` writes them)"
        raise Unreadable("invalid_json", f"{fault.msg} at line {fault.lineno} column {fault.colno}{more}") from None
    except (RecursionError, ValueError):
        raise Unreadable("invalid_json", str(error)) from None


def _clean(value: Any) -> Any:
    """Replace lone surrogates by U+FFFD and numbers that JSON does not have by null."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value
