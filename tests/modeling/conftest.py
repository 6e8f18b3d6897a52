"""A whole model in a folder, for tests that look at its files or spoil them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from traceforge_core.modeling.tiny import build_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole model")
    build_tiny(folder)
    return folder


@pytest.fixture
def model(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "a model"))


def change(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **fields}), encoding="utf-8")
