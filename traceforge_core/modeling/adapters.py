"""Adapters on disk, in PEFT's format: written whole, hashed, and compared."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from traceforge_core.errors import TraceForgeError

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
# What an adapter's weights are multiplied by, and how they are put to use, is said in its configuration alone.
APPLIED = {"peft_type": "LORA", "lora_alpha": 8, "use_rslora": False, "use_dora": False, "alpha_pattern": {}}


def save_adapter(model: Any, folder: Path) -> None:
    """Save a PeftModel's adapter so that `PeftModel.from_pretrained` loads it. The folder appears when it is whole."""
    scratch = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    model.save_pretrained(str(scratch), save_embedding_layers=False)
    (scratch / "README.md").unlink(missing_ok=True)  # PEFT's model card: an empty form
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)


def read_adapter(folder: Path) -> dict[str, Any]:
    """An adapter's tensors by name, on the CPU. Raises TraceForgeError where there is none."""
    from safetensors.torch import load_file

    path = folder / WEIGHTS
    if not path.is_file():
        raise TraceForgeError(f"There is no adapter in {folder} ({WEIGHTS} is missing).")
    return load_file(path)


def read_application(folder: Path) -> dict[str, Any] | None:
    """How an adapter's weights are put to use (APPLIED; what is not said is PEFT's default). None where its
    configuration is not there or torn."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {name: default if config.get(name) is None else config[name] for name, default in APPLIED.items()}


def hash_adapter(folder: Path) -> str:
    """Hash of an adapter's names, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(read_adapter(folder).items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.contiguous().view(-1).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def relative_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, str, float]:
    """How far `ours` is from `theirs`, L2 relative to `theirs`: over everything, and the tensor that differs most.

    Returns (overall, name of the worst tensor, its difference). In float64. A tensor that is zero in both differs by 0,
    one that is zero in `theirs` alone by infinity. Raises TraceForgeError where names or shapes differ.
    """
    import math

    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise TraceForgeError(f"The two do not have the same tensors: {', '.join(odd[:5])} is in only one of them.")
    total_difference = total_size = worst = 0.0
    worst_name = ""
    for name in sorted(theirs):
        if ours[name].shape != theirs[name].shape:
            raise TraceForgeError(f"{name} has shape {tuple(ours[name].shape)} in one and {tuple(theirs[name].shape)}.")
        own, other = ours[name].double().reshape(-1), theirs[name].double().reshape(-1)
        apart = own - other
        difference, size = float(apart @ apart), float(other @ other)
        total_difference += difference
        total_size += size
        relative = _ratio(math.sqrt(difference), math.sqrt(size))
        if relative >= worst or math.isnan(relative):
            worst, worst_name = relative, name
    return _ratio(math.sqrt(total_difference), math.sqrt(total_size)), worst_name, worst


def _ratio(difference: float, size: float) -> float:
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / size
