"""Files of a run: written whole, hashed, shared; and what to tell where one cannot be written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from traceforge_core.errors import TraceForgeError, page


def write_json(path: Path, value: Any) -> None:
    """`write_text` of a value as JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it."""
    scratch = path.with_name(path.name + ".tmp")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def hash_files(folder: Path) -> dict[str, dict[str, Any]]:
    """sha256 and size of every file below a folder, by relative path."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            hashes[path.relative_to(folder).as_posix()] = {"sha256": digest, "bytes": path.stat().st_size}
    return hashes


def fingerprint_tree(path: Path) -> str:
    """Hash of the names, sizes and modification times below a path: cheap enough for a corpus of any size."""
    digest = hashlib.sha256()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        try:
            stat = file.stat()
        except OSError:  # a file removed or unreadable meanwhile: reading it will say so
            continue
        name = file.relative_to(path).as_posix() if path.is_dir() else file.name
        digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def share_files(folder: Path) -> None:
    """Give every file the permissions that a new file gets here: some libraries write files that only their owner can
    read, and a model server or a colleague runs as somebody else."""
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o111 | 0o666 & ~umask)


FULL_DISK_WORDS = (
    "No space left on device",
    "StorageFull",
    "Disk quota exceeded",
    "iostream error",  # torch.save's own words, where not all of a file could be written
    "unexpected pos",
)


def disk_is_full(error: BaseException) -> bool:
    """Whether an error says that the disk is full. safetensors and torch have errors of their own for that."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(sign in str(error) for sign in FULL_DISK_WORDS)


def full_disk(what: str, then: str = "and run it again; finished stages are kept") -> TraceForgeError:
    """What a person is told where the disk is full. `what` could not be done; `then` follows on "Free some space"."""
    return TraceForgeError(f"The disk is full: {what}. Free some space {then}. {page('disk-full')}")


def not_written(error: OSError, what: str, cure: str) -> TraceForgeError:
    """What a person is told where something cannot be written: `what` ("write to the run folder X"), why, and `cure`,
    unless the disk is full, which another place or other permissions would not mend."""
    if disk_is_full(error):
        return full_disk(f"cannot {what}")
    return TraceForgeError(f"Cannot {what}: {error.strerror}. {cure}")
