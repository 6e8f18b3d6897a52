"""Whether the weight files of a model's folder are all there and whole, found out without reading a weight.

check_weight_files(Path("models/qwen"))
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traceforge_core.errors import TraceForgeError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
AGAIN = "The download or copy is not whole; fetch it again (after a git clone: `git lfs pull`)."


def check_weight_files(folder: Path, index: Mapping[str, Any]) -> None:
    """Look for the files that transformers would load, and read the header of each: some milliseconds for any size.

    `index` is the content of model.safetensors.index.json, empty where there is none. Raises TraceForgeError naming
    files that are missing, or that are cut, grown or no safetensors.
    """
    if (folder / SINGLE).is_file():  # which transformers prefers to shards beside it
        needed = [SINGLE]
    elif index:
        needed = sorted({str(name) for name in (index.get("weight_map") or {}).values()})
    else:
        needed = [] if list(folder.glob("pytorch_model*.bin")) else [SINGLE]
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise TraceForgeError(f"The model folder {folder} lacks {_some(missing)} of its weight files. {AGAIN}")
    torn = {name: why for name in needed if (why := _torn(folder / name)) is not None}
    if torn:
        first = next(iter(torn.values()))
        raise TraceForgeError(
            f"In the model folder {folder}, {_some(list(torn))} of the weight files cannot be read: {first}. {AGAIN}"
        )


def _torn(path: Path) -> str | None:
    """Why a safetensors file cannot be read, or None. Its header says where each tensor lies; the file has to end where
    the last of them does."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            return None
    except (SafetensorError, OSError, ValueError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        return f"{reason} ({path.stat().st_size:,} bytes)"


def _some(names: list[str]) -> str:
    """How many they are, and the first three: "5 (a, b, c, ...)"."""
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
