"""Trajectories at rest: what is written is read again, byte for byte the same each time."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceforge_core.errors import TraceForgeError
from traceforge_core.trajectories import store
from traceforge_core.trajectories.model import Action, Message, Trajectory
from traceforge_core.trajectories.store import TrajectoryWriter, decode_messages, encode_messages, read_trajectories

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ACTIONS = st.builds(Action, TEXT, st.dictionaries(TEXT, VALUES, max_size=3), st.none() | TEXT, st.booleans())
MESSAGES = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    TEXT,
    st.none() | TEXT,
    st.lists(ACTIONS, max_size=2),
    st.none() | TEXT,
    st.none() | st.integers(-255, 255),
    st.booleans(),
)


def trajectory(number: int, text: str = "x") -> Trajectory:
    return Trajectory(f"id{number}", "case", f"run{number}", "f", "s", [Message("user", text)], left_out={"a": number})


@given(st.lists(MESSAGES, max_size=4))
def test_messages_survive_encoding(messages: list[Message]):
    assert decode_messages(encode_messages(messages)) == messages


def test_trajectories_come_back_in_order_over_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "ROW_GROUP_BYTES", 1000)
    monkeypatch.setattr(store, "PART_BYTES", 3000)
    written = [trajectory(i, "é" * 300) for i in range(40)]
    with TrajectoryWriter(tmp_path / "trajectories") as writer:
        for item in written:
            writer.write(item)
    parts = sorted((tmp_path / "trajectories").iterdir())
    assert len(parts) > 2 and parts[0].name == "part-00000.parquet"
    assert list(read_trajectories(tmp_path)) == written


def test_the_same_trajectories_give_the_same_bytes(tmp_path: Path):
    for name in ("a", "b"):
        with TrajectoryWriter(tmp_path / name) as writer:
            for i in range(5):
                writer.write(trajectory(i))
    assert (tmp_path / "a" / "part-00000.parquet").read_bytes() == (tmp_path / "b" / "part-00000.parquet").read_bytes()


def test_columns_are_as_promised(tmp_path: Path):
    with TrajectoryWriter(tmp_path / "trajectories") as writer:
        writer.write(trajectory(1))
    table = pq.read_table(tmp_path / "trajectories" / "part-00000.parquet")
    expected = "trajectory_id case run format source outcome outcome_source exit_status model messages tools left_out"
    assert " ".join(table.column_names) == expected
    assert table.column("outcome").null_count == 1


def test_no_trajectories_is_an_empty_part_and_no_part_is_an_error(tmp_path: Path):
    with TrajectoryWriter(tmp_path / "trajectories"):
        pass
    assert list(read_trajectories(tmp_path)) == []
    with pytest.raises(TraceForgeError, match="Run the ingest stage"):
        list(read_trajectories(tmp_path / "nowhere"))
