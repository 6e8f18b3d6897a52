"""What a result was made with: the library's own source, the libraries beside it, the device."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

RECORDED_VERSIONS = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "accelerate",
    "bitsandbytes",
    "unsloth",
    "prefect",
)


@cache
def source_hash() -> str:
    """Hash of this package's own Python source, presets and templates: other code, other results."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*")):
        if path.suffix in {".py", ".jinja"}:
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def installed_versions() -> dict[str, str]:
    """Versions of the libraries that results depend on, and Python's."""
    versions = {"python": platform.python_version()}
    for name in RECORDED_VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def device_name() -> str:
    """The GPUs if a CUDA torch is already loaded in this process, else the CPU. Never imports torch by itself."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"
