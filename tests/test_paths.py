"""Paths as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from traceforge_core.config import load_config
from traceforge_core.errors import TraceForgeError
from traceforge_core.paths import written
from traceforge_core.start_check import check_start


def test_a_home_is_put_in_its_place_and_nobodys_home_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert written("~/logs") == tmp_path / "logs" and written("a/~b") == Path("a/~b")
    with pytest.raises(TraceForgeError, match="~no-such-user/logs begins with the home of a user that is not known"):
        check_start(["ingest"], load_config(assignments=["ingest.path=~no-such-user/logs"]))
    with pytest.raises(TraceForgeError, match="~no-such-user/model"):
        check_start(["model"], load_config(assignments=["model.name=~no-such-user/model"]))
