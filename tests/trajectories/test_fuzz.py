"""Bad input of every kind: torn at every byte, bits flipped, wrong types. Nothing crashes, nothing is lost."""

from __future__ import annotations

import copy
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trajectories.make import chat_row, mini_v1, mini_v2
from traceforge_core.trajectories.formats import FORMATS
from traceforge_core.trajectories.model import Trajectory
from traceforge_core.trajectories.reading import read_unit
from traceforge_core.trajectories.redaction import redact
from traceforge_core.trajectories.store import decode_messages, encode_messages
from traceforge_core.trajectories.survey import Quarantined, Unit, survey

EVENT = {"id": 1, "source": "agent", "action": "run", "args": {"command": "ls", "thought": "look"}}
SAMPLES: dict[str, Any] = {
    "mini-v1": mini_v1(),
    "mini-v2": mini_v2(turns=1),
    "responses": {
        **mini_v2(turns=0),
        "messages": [
            {
                "object": "response",
                "output": [{"type": "function_call", "call_id": "c", "name": "bash", "arguments": "{}"}],
            },
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
    },
    "list": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}],
    "chat": chat_row("x", instance_id="a__b-1_3", tools='[{"name": "t"}]', resolved=True, model="m"),
    "swe-agent": {
        "trajectory": [{"action": "ls", "observation": "x", "response": "r", "messages": []}],
        "history": [
            {"role": "assistant", "content": "r", "action": "ls", "is_demo": True},
            {"role": "user", "content": "o"},
        ],
        "info": {"exit_status": "submitted", "submission": "o"},
        "replay_config": '{"agent": {"model": {"name": "m"}}}',
    },
    "openhands": [EVENT, {"id": 2, "observation": "run", "content": "x", "cause": 1, "extras": {"exit_code": 0}}],
    "output": {
        "instance_id": "a",
        "history": [EVENT],
        "metadata": {"llm_config": {"model": "m"}},
        "test_result": {"report": {}},
    },
    "sdk": [
        {
            "id": "1",
            "kind": "ActionEvent",
            "source": "agent",
            "thought": [],
            "tool_call": {"name": "t", "arguments": "{}"},
        },
        {"id": "2", "kind": "ObservationEvent", "source": "environment", "observation": {"content": []}},
        {"id": "3", "kind": "Other", "source": "environment", "key": "stats", "value": {"usage_to_metrics": {"a": {}}}},
    ],
    "completion": {
        "messages": [{"role": "user", "content": "x"}],
        "response": {"choices": [{"message": {"content": "y", "tool_calls": [{"function": {"name": "t"}}]}}]},
        "kwargs": {"tools": []},
    },
    "nebius": {
        "instance_id": "a",
        "trajectory": [{"role": "ai", "text": "```\nls\n```", "mask": True}],
        "target": True,
    },
    "sharegpt": {
        "conversations": [{"from": "function_call", "value": '{"name": "t", "arguments": {}}'}],
        "system": "s",
    },
    "atif": {
        "schema_version": "ATIF-v1.4",
        "agent": {"model_name": "m"},
        "steps": [
            {
                "step_id": 1,
                "source": "agent",
                "message": "x",
                "tool_calls": [{"tool_call_id": "c", "function_name": "f", "arguments": {}}],
                "observation": {"results": [{"source_call_id": "c", "content": "o"}]},
            }
        ],
    },
    "claude": [
        {"type": "user", "uuid": "1", "parentUuid": None, "message": {"role": "user", "content": "hi"}},
        {
            "type": "assistant",
            "uuid": "2",
            "parentUuid": "1",
            "message": {
                "id": "m",
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "n", "input": {}}],
            },
        },
        {
            "type": "user",
            "uuid": "3",
            "parentUuid": "2",
            "isSidechain": True,
            "message": {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": []}]},
        },
    ],
    "codex": [
        {"type": "session_meta", "payload": {"id": "x", "instructions": "i"}},
        {
            "type": "response_item",
            "payload": {"type": "reasoning", "summary": [{"text": "s"}], "encrypted_content": "e"},
        },
        {
            "type": "response_item",
            "payload": {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
        },
        {
            "type": "response_item",
            "payload": {"type": "function_call_output", "call_id": "c", "output": '{"output": "o"}'},
        },
        {"type": "compacted", "payload": {"message": "m", "replacement_history": []}},
    ],
}
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def as_file(value: Any) -> bytes:
    """A list becomes JSON Lines, as logs are; anything else one document."""
    if isinstance(value, list):
        return b"".join(json.dumps(item).encode() + b"\n" for item in value)
    return json.dumps(value).encode()


def read_all(folder: Path, data: bytes, name: str = "x.json") -> list[Trajectory | Quarantined]:
    """Read one file; whatever is in it, something comes out, and what comes out can be stored."""
    (folder / name).write_bytes(data)
    items = list(read_unit(folder, Unit((name,))))
    assert items, "a file has vanished from the counts"
    for item in items:
        if isinstance(item, Quarantined):
            assert item.reason and item.source.startswith(name)
            continue
        encoded, _ = redact(item.messages, encode_messages(item.messages))
        assert decode_messages(encoded) == item.messages
        for text in (item.case, item.run, item.source):
            assert isinstance(text, str) and text
        for maybe in (item.model, item.exit_status):
            assert maybe is None or isinstance(maybe, str)
        encoded.decode()
    return items


def test_the_samples_cover_every_format(tmp_path: Path):
    formats = {
        item.format
        for value in SAMPLES.values()
        for item in read_all(tmp_path, as_file(value))
        if isinstance(item, Trajectory)
    }
    assert formats | {"openai-chat"} == {form.name for form in FORMATS} | {"hf-rows"}


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_file_torn_at_any_byte_is_read_or_set_aside(tmp_path: Path, name: str):
    data = as_file(SAMPLES[name])
    for end in range(len(data)):
        read_all(tmp_path, data[:end])


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_flipped_bits_do_no_harm(tmp_path: Path, name: str):
    data = as_file(SAMPLES[name])
    draw = random.Random(name)
    for _ in range(100):
        broken = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            broken[draw.randrange(len(broken))] ^= 1 << draw.randrange(8)
        read_all(tmp_path, bytes(broken))


@pytest.mark.parametrize("name", sorted(SAMPLES))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(junk=JUNK, pick=st.randoms(use_true_random=False))
def test_values_of_the_wrong_type_are_read_or_set_aside(tmp_path: Path, name: str, junk: Any, pick: random.Random):
    value = copy.deepcopy(SAMPLES[name])
    places = list(_places(value))
    holder, key = pick.choice(places)
    holder[key] = junk
    read_all(tmp_path, as_file(value))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=200))
def test_any_bytes_at_all_are_set_aside(tmp_path: Path, data: bytes):
    read_all(tmp_path, data)
    read_all(tmp_path, b"\x1f\x8b" + data, "x.gz")
    read_all(tmp_path, b"\x28\xb5\x2f\xfd" + data, "x.zst")
    read_all(tmp_path, b"PAR1" + data, "x.parquet")


def test_several_documents_torn_at_any_byte_are_read_or_set_aside(tmp_path: Path):
    whole = json.dumps(SAMPLES["chat"], indent=1).encode()
    data = whole + b"\n" + json.dumps(SAMPLES["mini-v2"], indent=1).encode()
    for end in range(len(data)):
        items = read_all(tmp_path, data[:end])
        assert sum(isinstance(item, Trajectory) for item in items) == (end >= len(whole))
        assert len(items) == 1 + (end > len(whole) + 1)


def test_packed_files_torn_at_any_byte_are_set_aside(tmp_path: Path):
    data = gzip.compress(as_file(SAMPLES["mini-v2"]))
    for end in range(len(data) - 1):
        assert all(isinstance(item, Quarantined) for item in read_all(tmp_path, data[:end], "x.json.gz"))


def test_real_files_with_flipped_bits_and_torn_ends_do_no_harm(shared_trajectories: Path, tmp_path: Path):
    draw = random.Random(1)
    units = [unit for unit in survey(shared_trajectories).units if unit.bytes < 300_000]
    for unit in units:
        data = (shared_trajectories / unit.paths[0]).read_bytes()
        for _ in range(3):
            broken = bytearray(data[: draw.randrange(1, len(data))] if draw.random() < 0.5 else data)
            for _ in range(draw.randint(0, 3)):
                broken[draw.randrange(len(broken))] ^= 1 << draw.randrange(8)
            read_all(tmp_path, bytes(broken))


def test_a_corpus_of_a_thousand_broken_files_adds_up(write: Any, run_ingest: Any):
    draw = random.Random(2)
    names = sorted(SAMPLES)
    for number in range(1000):
        data = bytearray(as_file(SAMPLES[names[number % len(names)]]))
        data = data[: draw.randrange(len(data))] if number % 2 else data
        for _ in range(draw.randint(0, 3) if data else 0):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        folder = write(f"{number:04d}.json", bytes(data))
    figures = run_ingest(folder).figures
    assert figures["files"] == 1000
    assert figures["found"] >= 1000


def _places(value: Any) -> Any:
    """Every (container, key) in a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from _places(item)
