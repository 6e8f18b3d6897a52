"""Weight files that are missing, cut, or no safetensors are found by their headers, whatever their size."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import pytest

from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.weight_files import INDEX, SINGLE, check_weight_files

SHARDS = tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def write(path: Path, rows: int = 100) -> None:
    """A safetensors file of one float32 tensor; its zeros take no room on the disk."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [rows, 1000], "data_offsets": [0, rows * 4000]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + rows * 4000)


def sharded(folder: Path) -> dict[str, dict[str, str]]:
    """The shards' files, and the index that names them."""
    for name in SHARDS:
        write(folder / name)
    index = {"weight_map": {f"layer.{number}": name for number, name in enumerate(SHARDS)}}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return index


def test_a_file_of_many_gigabytes_is_looked_through_at_once(tmp_path: Path) -> None:
    write(tmp_path / SINGLE, rows=16 << 20)  # 62 GiB
    began = time.monotonic()
    check_weight_files(tmp_path, {})
    assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", r"header too small \(0 bytes\)"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            r"header too large .* clone: `git lfs pull`",
        ),
        (None, r"file not fully covered \(1,000 bytes\)"),
    ],
    ids=["empty", "lfs pointer", "cut"],
)
def test_a_file_that_is_not_whole_is_named_with_the_reason(tmp_path: Path, content: bytes | None, why: str) -> None:
    write(tmp_path / SINGLE)
    if content is None:
        os.truncate(tmp_path / SINGLE, 1000)
    else:
        (tmp_path / SINGLE).write_bytes(content)
    told = rf"In the model folder .*, 1 \(model\.safetensors\) of the weight files cannot be read: .*{why}"
    with pytest.raises(TraceForgeError, match=told):
        check_weight_files(tmp_path, {})


def test_every_shard_that_the_index_names_is_looked_at(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    check_weight_files(tmp_path, index)
    os.truncate(tmp_path / SHARDS[1], 5000)
    with pytest.raises(TraceForgeError, match=rf"1 \({SHARDS[1]}\) of the weight files cannot be read"):
        check_weight_files(tmp_path, index)
    (tmp_path / SHARDS[2]).unlink()
    with pytest.raises(TraceForgeError, match=rf"lacks 1 \({SHARDS[2]}\) of its weight files.*fetch it again"):
        check_weight_files(tmp_path, index)


def test_an_index_left_beside_one_whole_file_is_not_asked_for_since_transformers_does_not(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    (tmp_path / SHARDS[0]).unlink()
    write(tmp_path / SINGLE)
    check_weight_files(tmp_path, index)


def test_a_folder_without_weights_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceForgeError, match=r"lacks 1 \(model\.safetensors\) of its weight files"):
        check_weight_files(tmp_path, {})
