"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def shared_trajectories() -> Path:
    """Real trajectory files that lie beside the checkout; they are not part of the project."""
    folder = REPOSITORY.parent / "shared" / "trajectories"
    if not folder.is_dir():
        pytest.skip(f"real trajectories are not there ({folder}); they are test data outside the repository")
    return folder
