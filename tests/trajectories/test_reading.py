"""Which files are read, by content and not by name; what is set aside, with which reason; nothing is lost."""

from __future__ import annotations

import gzip
import json
import os
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.trajectories.make import chat_row, mini_v1, mini_v2
from traceforge_core.trajectories import json_lines, parsing, reading, values
from traceforge_core.trajectories.formats.protocol import Unreadable
from traceforge_core.trajectories.parsing import array_items, parse
from traceforge_core.trajectories.survey import Unit, survey


def lines(*values: Any) -> str:
    return "".join((value if isinstance(value, str) else json.dumps(value)) + "\n" for value in values)


def test_names_do_not_matter_and_formats_may_be_mixed(write, run_ingest):
    write("a/notes.txt", mini_v2("a__b-1"))
    write(
        "b/data.json", lines(chat_row("one"), mini_v2("a__b-2"), {"conversations": [{"from": "human", "value": "hi"}]})
    )
    write("README.md", "# not a trajectory")
    folder = write("c/x.jsonl", [mini_v1("a__b-3"), chat_row("two")])
    result = run_ingest(folder)
    assert result.figures["read"] == 6 and result.figures["quarantined"] == 0
    assert result.figures["by_format"] == {
        "mini-swe-agent-v1": 1,
        "mini-swe-agent-v2": 2,
        "openai-chat": 2,
        "sharegpt": 1,
    }
    assert result.figures["other_files"] == {".md": 1}
    assert {t.source for t in result.trajectories} >= {"a/notes.txt", "b/data.json:2", "c/x.jsonl#0"}
    assert len({t.trajectory_id for t in result.trajectories}) == 6


def test_packed_files_are_read_whatever_their_name(write, run_ingest):
    data = json.dumps(mini_v2("a__b-1")).encode()
    write("a.traj.json.gz", gzip.compress(data))
    write("b.traj.json.zst", zstandard.compress(json.dumps(mini_v2("a__b-2")).encode()))
    write("rows.jsonl.zst", zstandard.compress(lines(chat_row("x"), chat_row("y")).encode()))
    folder = write("c.json", gzip.compress(json.dumps(mini_v2("a__b-3")).encode()))
    assert run_ingest(folder).figures["read"] == 5


def test_parquet_rows_are_read(write, run_ingest, tmp_path: Path):
    folder = write("keep.jsonl", lines(chat_row("z")))
    rows = [chat_row("x", instance_id="a__b-1", resolved=True), chat_row("y", instance_id="a__b-1", resolved=False)]
    rows.append({"messages": [], "instance_id": "a__b-2", "resolved": None})
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "torn.parquet").write_bytes((folder / "train.parquet").read_bytes()[:200])
    result = run_ingest(folder)
    assert result.figures["by_outcome"] == {"resolved": 1, "unknown": 1, "unresolved": 1}
    assert {row["reason"] for row in result.quarantine} == {"unknown_format", "damaged_parquet"}


@pytest.mark.parametrize("name", ["nebius/1.sample_raw.json", "swe-gym/1.sample_raw.json", "swe-smith/1.jsonl"])
def test_real_rows_say_the_same_out_of_parquet(shared_trajectories: Path, name: str, write, run_ingest, tmp_path: Path):
    text = (shared_trajectories / name).read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else json.loads(text)
    folder = tmp_path / "parquet"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    of_json = run_ingest(write("rows.jsonl", lines(*rows)), out=tmp_path / "one")
    of_parquet = run_ingest(folder, out=tmp_path / "two")
    assert [run.messages for run in of_parquet.trajectories] == [run.messages for run in of_json.trajectories]
    assert of_parquet.figures["by_outcome"] == of_json.figures["by_outcome"]
    assert len(rows) == of_parquet.figures["read"] > 2


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.json", b"", "empty_file"),
        ("blank.jsonl", b" \n\n", "empty_file"),
        ("torn.json", json.dumps(mini_v2())[:300].encode(), "invalid_json"),
        ("latin.json", b'{"messages": "caf\xe9"}', "not_utf8"),
        ("config.json", b'{"a": 1}', "unknown_format"),
        ("number.json", b"42", "unknown_format"),
        ("list.json", b"[]", "unknown_format"),
        ("rows.jsonl", lines({"a": 1}, {"a": 2}).encode(), "unknown_format"),
        ("deep.json", b"[" * 100_000 + b"]" * 100_000, "invalid_json"),
        (
            "packed.json.gz",
            gzip.compress(b'{"a": ' * 99, mtime=0)[:30],
            "damaged_archive",
        ),  # a date would make a test with another name each second
        ("packed.json.zst", zstandard.compress(b"{" * 999)[:12], "damaged_archive"),
        ("binary.parquet", b"PAR1 but not really", "damaged_parquet"),
        (
            "wizard.json",
            json.dumps([{"role": "user", "content": ""}] * 3 + [{"role": "wizard"}]).encode(),
            "unknown_role",
        ),
        (
            "holes.json",
            json.dumps({"trajectory_format": "mini-swe-agent-1", "messages": [3]}).encode(),
            "not_a_message",
        ),
        ("nothing.json", json.dumps({"trajectory_format": "mini-swe-agent-1", "messages": []}).encode(), "no_messages"),
    ],
)
def test_what_cannot_be_read_is_set_aside_with_its_reason(write, run_ingest, name: str, content: bytes, reason: str):
    write("good.traj.json", mini_v2())
    folder = write(name, content)
    result = run_ingest(folder)
    assert result.figures["read"] == 1
    assert [(row["source"], row["reason"]) for row in result.quarantine] == [(name, reason)]
    assert result.quarantine[0]["detail"]


DEEP = {"name": "f", "arguments": '{"a":' * 300 + "1" + "}" * 300}


@pytest.mark.parametrize(
    ("content", "reason", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "git_lfs_pointer", "git lfs pull"),
        (json.dumps({"messages": []}).encode("utf-16-le"), "not_utf8", "UTF-16 without a byte-order mark"),
        (lines(chat_row()).encode() + b'{"a": 1} {"b": 2}\n', "invalid_json", "one a line, as `jq -c .`"),
        (b'{"messages": []}', "unknown_format", "messages is empty"),
        (b'{"messages": null}', "unknown_format", "messages is null"),
        (b'{"messages": [7]}', "unknown_format", "messages[0] is a int"),
        (
            b'{"messages": [{"role": "user"}, {"role": "judge"}]}',
            "unknown_format",
            "messages[1] has the role 'judge'",
        ),
        (
            json.dumps({"messages": [{"role": "assistant", "tool_calls": [{"function": DEEP}]}]}).encode(),
            "not_json",
            "nested too deep",
        ),
    ],
)
def test_the_reason_says_what_would_mend_the_file(write, run_ingest, content: bytes, reason: str, said: str):
    (row,) = run_ingest(write("strange.json", content)).quarantine
    assert row["reason"] == reason and said in row["detail"]


def test_roles_may_be_in_capitals(write, run_ingest):
    messages = [{"role": "User", "content": "Mend it."}, {"role": "ASSISTANT", "content": "Done."}]
    (trajectory,) = run_ingest(write("chat.json", json.dumps({"messages": messages}))).trajectories
    assert [message.role for message in trajectory.messages] == ["user", "assistant"]


def test_a_torn_last_line_costs_a_row_its_trajectory_and_a_log_one_line(write, run_ingest):
    write("rows.jsonl", lines(chat_row("x"), chat_row("y")) + '{"messages": [{"role": "us')
    event = {"type": "user", "uuid": "u1", "sessionId": "s", "message": {"role": "user", "content": "hi"}}
    answer = {**event, "type": "assistant", "uuid": "u2", "parentUuid": "u1"}
    answer["message"] = {"role": "assistant", "id": "m", "content": [{"type": "text", "text": "ho"}]}
    folder = write("session.jsonl", lines(event, answer) + '{"type": "assist')
    result = run_ingest(folder)
    assert [row["source"] for row in result.quarantine] == ["rows.jsonl:3"]
    assert result.figures["read"] == 3
    assert result.figures["left_out"] == {"unparsable_line": 1}


def test_byte_order_marks_nan_and_lone_surrogates_are_no_obstacle(write, run_ingest):
    write("bom.json", b"\xef\xbb\xbf" + json.dumps(mini_v2("a__b-1")).encode())
    write("utf16.json", json.dumps(mini_v2("a__b-2")).encode("utf-16"))
    value = mini_v2("a__b-3")
    value["info"]["cost"] = float("nan")
    value["messages"][2]["content"] = "lone \ud83d surrogate, whole \U0001f4dc"
    folder = write("odd.json", json.dumps(value))
    result = run_ingest(folder)
    assert result.figures["read"] == 3
    odd = next(t for t in result.trajectories if t.case == "a__b-3")
    assert odd.messages[2].content == "lone \ufffd surrogate, whole \U0001f4dc"


def test_a_folder_of_events_is_one_trajectory(write, run_ingest):
    for number, event in enumerate(
        [
            {"kind": "SystemPromptEvent", "source": "agent", "id": "0", "system_prompt": {"type": "text", "text": "S"}},
            {
                "kind": "MessageEvent",
                "source": "user",
                "id": "1",
                "llm_message": {"role": "user", "content": [{"type": "text", "text": "Do it"}]},
            },
            {
                "kind": "ActionEvent",
                "source": "agent",
                "id": "2",
                "thought": [{"type": "text", "text": "I look"}],
                "tool_call": {"id": "c1", "name": "terminal", "arguments": '{"command": "ls"}'},
                "llm_response_id": "r1",
            },
            {
                "kind": "ActionEvent",
                "source": "agent",
                "id": "3",
                "thought": [],
                "tool_call": {"id": "c2", "name": "terminal", "arguments": '{"command": "pwd"}'},
                "llm_response_id": "r1",
            },
            {
                "kind": "ObservationEvent",
                "source": "environment",
                "id": "4",
                "tool_call_id": "c1",
                "observation": {"content": [{"type": "text", "text": "x.py"}], "exit_code": 0},
            },
        ]
    ):
        write(f"fix-1/events/event-{number:05d}-abc{number}.json", event)
    folder = write("fix-1/base_state.json", {"id": "x", "agent": {}, "workspace": {}})
    result = run_ingest(folder)
    (trajectory,) = result.trajectories
    assert (trajectory.case, trajectory.source) == ("fix-1", "fix-1/events")
    assert [m.role for m in trajectory.messages] == ["system", "user", "assistant", "tool"]
    assert [a.arguments for a in trajectory.messages[2].actions] == [{"command": "ls"}, {"command": "pwd"}]
    assert result.figures["other_files"] == {"conversation state": 1}


def test_of_the_logged_calls_of_a_run_the_last_is_kept(write, run_ingest):
    def log(*turns: str) -> dict[str, Any]:
        said = [{"role": "user", "content": [{"type": "text", "text": "go"}]}]
        said += [{"role": "assistant", "content": turn} for turn in turns[:-1]]
        answer = {"choices": [{"message": {"role": "assistant", "content": turns[-1]}}]}
        return {"messages": said, "response": answer, "kwargs": {}, "latency_sec": 1.0}

    write("logs/m-1757015046.707.json", log("a"))
    write("logs/m-1757015047.707.json", log("a", "b"))
    write("logs/m-1757015048.707.json", log("a", "b", "c"))
    folder = write("logs/m-1757015049.707.json", log("something else"))
    result = run_ingest(folder)
    assert [t.messages[-1].content for t in result.trajectories] == ["c", "something else"]
    assert result.figures["left_out"] == {"earlier_call_of_the_run": 2}


def test_two_runs_of_one_case_are_told_apart_wherever_they_lie(write, run_ingest):
    write("one/a__b-1/a__b-1.traj.json", mini_v2(note="1"))
    write("two/a__b-1/a__b-1.traj.json", mini_v2(note="2"))
    write("flat/a__b-1.first.traj.json", mini_v2(note="3"))
    write("flat/a__b-1.second.traj.json", mini_v2(note="4"))
    rows = [chat_row(str(i), instance_id="a__b-1", run_id="r") for i in range(1)]
    folder = write("rows.jsonl", lines(*rows, chat_row("q", instance_id="a__b-1")))
    result = run_ingest(folder)
    assert {t.case for t in result.trajectories} == {"a__b-1"}
    assert len({t.run for t in result.trajectories}) == len({t.trajectory_id for t in result.trajectories}) == 6


def test_exact_duplicates_are_counted_and_a_contradiction_between_them_reported(write, run_ingest):
    write("a.jsonl", lines(chat_row("x", instance_id="a__b-1", resolved=True)))
    write("b.jsonl", lines(chat_row("x", instance_id="a__b-1", resolved=False), chat_row("x", instance_id="a__b-1")))
    folder = write("c.jsonl.gz", gzip.compress(lines(chat_row("x", instance_id="a__b-1")).encode()))
    figures = run_ingest(folder).figures
    assert (figures["found"], figures["read"], figures["duplicates"]) == (4, 1, 3)
    assert figures["outcome_conflicts"] == 1


def test_predictions_and_links_in_circles_are_no_trajectories(write, run_ingest):
    write("preds.json", {"a__b-1": {"model_patch": "x", "instance_id": "a__b-1"}})
    folder = write("a.traj.json", mini_v2())
    os.symlink(folder, folder / "loop")
    result = run_ingest(folder)
    assert result.figures["read"] == 1
    assert result.figures["other_files"] == {"linked folder": 1, "predictions": 1}


def test_what_is_no_file_is_set_aside_with_what_it_is(write, run_ingest):
    folder = write("a.traj.json", mini_v2())
    os.symlink(folder / "gone.json", folder / "broken.json")
    os.mkfifo(folder / "pipe.json")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(folder / "agent.sock"))  # such paths have a limit of 108 bytes
        result = run_ingest(folder)
    assert (result.figures["found"], result.figures["read"], result.figures["quarantined"]) == (4, 1, 3)
    assert {row["reason"] for row in result.quarantine} == {"not_a_file"}
    said = {row["source"]: row["detail"] for row in result.quarantine}
    assert said["agent.sock"] == "a socket" and said["pipe.json"] == "a named pipe"
    assert said["broken.json"].startswith("a link to ") and said["broken.json"].endswith("where no file is")


def test_a_file_name_that_is_no_unicode_is_read(write, run_ingest):
    folder = write("a.traj.json", mini_v2())
    os.rename(os.fsencode(folder / "a.traj.json"), os.fsencode(folder) + b"/\xff.traj.json")
    assert run_ingest(folder).trajectories[0].source == "\ufffd.traj.json"


def test_a_single_file_is_a_corpus_too(write, run_ingest):
    folder = write("a__b-1.traj.json", mini_v2())
    assert run_ingest(folder / "a__b-1.traj.json").figures["read"] == 1


def test_a_document_above_the_limit_is_set_aside_unless_it_is_a_list(
    write, run_ingest, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parsing, "DOCUMENT_LIMIT", 2000)
    monkeypatch.setattr(json_lines, "DOCUMENT_LIMIT", 2000)
    monkeypatch.setattr(parsing, "CHUNK_BYTES", 64)
    rows = [chat_row(f'text "{i}" with \\ and ]}}', case=f"c{i}") for i in range(40)]
    write("rows.json", json.dumps(rows, indent=1))
    write("long.jsonl", lines(chat_row("short"), chat_row("x" * 3000), chat_row("short too")))
    folder = write("big.json", json.dumps(chat_row("x" * 3000), indent=1))
    result = run_ingest(folder)
    assert result.figures["read"] == 42
    assert {(row["source"], row["reason"]) for row in result.quarantine} == {
        ("big.json", "too_large"),
        ("long.jsonl:2", "too_large"),
    }
    assert {t.messages[0].content for t in result.trajectories} >= {f'text "{i}" with \\ and ]}}' for i in range(40)}


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000])
def test_a_list_is_taken_apart_at_any_chunk_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int):
    monkeypatch.setattr(parsing, "CHUNK_BYTES", chunk)
    items: list[Any] = [{"a": '"]}\\'}, [1, [2, {"b": []}]], {}, {"é": "\u2028 [{"}]
    path = tmp_path / "list.json"
    path.write_text(json.dumps(items, indent=2, ensure_ascii=False))
    assert list(array_items(path)) == items
    path.write_text(json.dumps(items)[:-3])
    with pytest.raises(Unreadable, match="middle of an array"):
        list(array_items(path))


def test_documents_one_behind_the_other_are_read_as_what_each_is(shared_trajectories: Path, write, run_ingest):
    names = ["mini-swe-agent-v2/3.traj.json", "swe-agent/3.traj", "atif/2.json", "openhands-completions/1.json"]
    values = [json.loads((shared_trajectories / name).read_text(encoding="utf-8")) for name in names]
    folder = write("all.json", "\n\n".join(json.dumps(value, indent=4) for value in values) + "\n")
    alone = [item for name in names for item in reading.read_unit(shared_trajectories, Unit((name,)))]
    together = run_ingest(folder)
    assert [t.source for t in together.trajectories] == [f"all.json#{number}" for number in range(4)]
    assert [t.messages for t in together.trajectories] == [t.messages for t in alone]
    assert [t.format for t in together.trajectories] == [
        "mini-swe-agent-v2", "swe-agent", "atif", "openhands-completions",
    ]  # fmt: skip
    assert (together.figures["found"], together.figures["quarantined"]) == (4, 0)


@pytest.mark.parametrize("between", ["", "\n", ",\n", "\x1e", "\r\n\r\n"])
@pytest.mark.parametrize("indent", [None, 2])
def test_whatever_stands_between_documents_none_is_lost(write, run_ingest, between: str, indent: int | None):
    texts = [json.dumps(chat_row(f'{n} "{{[" \\'), indent=indent) for n in range(60)]
    start = between if between == "\x1e" else ""  # RFC 7464
    result = run_ingest(write("rows.json", start + between.join(texts)))
    assert result.figures["read"] == 60 and result.figures["quarantined"] == 0


def test_a_log_may_be_pretty_printed_too(write, run_ingest):
    event = {"type": "user", "uuid": "u1", "sessionId": "s", "message": {"role": "user", "content": "hi"}}
    answer = {**event, "type": "assistant", "uuid": "u2", "parentUuid": "u1"}
    answer["message"] = {"role": "assistant", "id": "m", "content": [{"type": "text", "text": "ho"}]}
    folder = write("session.json", json.dumps(event, indent=2) + json.dumps(answer, indent=2))
    (trajectory,) = run_ingest(folder).trajectories
    assert trajectory.format == "claude-code" and [m.content for m in trajectory.messages] == ["hi", "ho"]


def test_of_several_documents_the_broken_ones_are_set_aside_and_counted(write, run_ingest):
    good = [json.dumps(mini_v2(f"a__b-{n}"), indent=2) for n in range(3)]
    broken = json.dumps({"a": 1}, indent=2).replace("1", "one")
    folder = write("all.json", "\n".join([good[0], "no JSON", good[1], broken, "7", good[2], good[0][:200]]))
    result = run_ingest(folder)
    assert [t.case for t in result.trajectories] == ["a__b-0", "a__b-1", "a__b-2"]
    assert [(row["source"], row["reason"]) for row in result.quarantine] == [
        ("all.json#1", "invalid_json"),
        ("all.json#3", "invalid_json"),
        ("all.json#4", "unknown_format"),
        ("all.json#6", "invalid_json"),
    ]
    assert "ends in the middle" in result.quarantine[-1]["detail"]


def test_documents_are_read_one_by_one_however_large_their_file(write, run_ingest, monkeypatch: pytest.MonkeyPatch):
    for module in (parsing, json_lines):
        monkeypatch.setattr(module, "DOCUMENT_LIMIT", 2000)
    monkeypatch.setattr(parsing, "CHUNK_BYTES", 64)
    texts = [json.dumps(chat_row(f'{n} "]}}"'), indent=1) for n in range(60)]
    write("all.json", "\n".join(texts))
    folder = write("all.json.gz", gzip.compress("\n".join([*texts[:3], json.dumps(chat_row("x" * 3000))]).encode()))
    result = run_ingest(folder)
    assert (result.figures["read"], result.figures["duplicates"]) == (60, 3)
    assert [(row["source"], row["reason"]) for row in result.quarantine] == [("all.json.gz#3", "too_large")]


def test_parse_says_where_it_failed():
    with pytest.raises(Unreadable, match="line 2 column"):
        parse(b'{"a": 1,\n b}')


def test_survey_reads_no_trajectory_whole(write):
    folder = write("a.traj.json", mini_v2())
    corpus = survey(folder)
    assert [unit.paths for unit in corpus.units] == [("a.traj.json",)]
    assert corpus.units[0].bytes == (folder / "a.traj.json").stat().st_size


@pytest.mark.parametrize("size", [1, 100, 333, 1000, 5000])
def test_a_large_file_of_rows_is_read_in_parts_as_if_it_were_whole(write, size: int):
    content = "\n" + lines(*(chat_row(f"é{i}" * (i % 7)) for i in range(60)), "{torn", chat_row("last")).rstrip("\n")
    folder = write("rows.jsonl", content)
    (unit,) = survey(folder).units
    parts = values.split(folder, unit, size)
    assert len(parts) > 1 or size == 5000
    whole = list(reading.read_unit(folder, unit))
    assert len(whole) == 62
    assert [item for part in parts for item in reading.read_unit(folder, part)] == whole


def test_logs_documents_and_packed_files_are_never_split(write):
    log = {"type": "user", "uuid": "u", "sessionId": "s", "message": {"role": "user", "content": "x" * 50}}
    write("log.jsonl", lines(*[log] * 20))
    write("one.json", mini_v2())
    folder = write("rows.jsonl.gz", gzip.compress(lines(*(chat_row(str(i)) for i in range(50))).encode(), 0))
    for unit in survey(folder).units:
        assert values.split(folder, unit, 100) == [unit]
