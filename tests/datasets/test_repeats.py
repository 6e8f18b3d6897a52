"""Turns that several trajectories have in common are learnt once: resumed and forked sessions, in any order."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.datasets.test_sft_jobs import build, small_jobs  # noqa: F401
from traceforge_core.config import load_config
from traceforge_core.datasets.repeats import TurnKeys, turn_keys
from traceforge_core.datasets.sample import IGNORED, learnable_turns
from traceforge_core.modeling.chat import ChatRenderer
from traceforge_core.trajectories.ingest import ingest
from traceforge_core.trajectories.model import Trajectory

Make = Callable[..., Trajectory]
Lines = list[dict[str, Any]]
SIDES = ("train", "held_out")


def codex_turn(name: str, code: int = 0) -> Lines:
    """What a rollout gets for one turn of the model, and the answer to its call."""
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": f"Turn {name}."}]}
    call = {"type": "function_call", "name": "shell", "arguments": json.dumps({"command": f"run {name}"})}
    output = json.dumps({"output": f"seen {name}", "metadata": {"exit_code": code}})
    answer = {"type": "function_call_output", "call_id": f"call_{name}", "output": output}
    items = [said, call | {"call_id": f"call_{name}"}, answer]
    return [{"timestamp": name, "type": "response_item", "payload": item} for item in items]


def codex_session(name: str, task: str, turns: Sequence[Lines], copied: Lines = []) -> Lines:  # noqa: B006
    """A rollout; one that resumes or forks another has its own header, then lines of the other one `copied`."""
    meta = {"timestamp": name, "type": "session_meta", "payload": {"id": name, "instructions": "Be brief."}}
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": task}]}
    start = copied or [{"timestamp": name, "type": "response_item", "payload": said}]
    return [meta, *start, *(line for turn in turns for line in turn)]


def claude_lines(session: str, names: Sequence[str]) -> Lines:
    lines: Lines = [{"type": "user", "message": {"role": "user", "content": "Please mend it."}}]
    for name in names:
        blocks = [{"type": "text", "text": f"Turn {name}."}]
        blocks += [{"type": "tool_use", "id": f"toolu_{name}", "name": "Bash", "input": {"command": f"run {name}"}}]
        result = [{"type": "tool_result", "tool_use_id": f"toolu_{name}", "content": f"seen {name}"}]
        lines.append({"type": "assistant", "message": {"id": f"msg_{name}", "role": "assistant", "content": blocks}})
        lines.append({"type": "user", "message": {"role": "user", "content": result}})
    above = [None, *(f"u{number}" for number in range(len(lines)))]
    return [
        line | {"uuid": f"u{number}", "parentUuid": above[number], "sessionId": session}
        for number, line in enumerate(lines)
    ]


def sessions() -> dict[str, Lines]:
    """A Codex session with a recovery in it, its resumption, two forks and a copy that nothing was added to; a Claude
    Code session and its resumption; a session of another task."""
    first = [codex_turn("a1"), codex_turn("a2", code=1), codex_turn("a3"), codex_turn("a4")]
    whole = codex_session("one", "Mend it.", first)
    apart = [codex_turn(f"z{n}", code=n % 2) for n in range(4)]
    return {
        "one": whole,
        "resumed": codex_session("resumed", "", [codex_turn("b5"), codex_turn("b6")], copied=whole[1:]),
        "forked": codex_session("forked", "", [codex_turn("c3"), codex_turn("c4")], copied=whole[1:8]),
        "forked-again": codex_session("forked-again", "", [codex_turn("d3")], copied=whole[1:8]),
        "opened": codex_session("opened", "", [], copied=whole[1:8]),
        "claude": claude_lines("s1", ["p1", "p2", "p3"]),
        "claude-resumed": claude_lines("s2", ["p1", "p2", "p3", "p4"]),
        "other": codex_session("other", "Mend something else.", apart),
    }


DISTINCT = {
    *("a1", "a2", "a3", "a4", "b5", "b6", "c3", "c4", "d3", "p1", "p2", "p3", "p4"),
    *(f"z{n}" for n in range(4)),
}
COPIES = {"codex-rollout": 4 + 2 + 2 + 2, "claude-code": 3}


def write_corpus(folder: Path, names: Sequence[str]) -> Path:
    """The sessions read in this order."""
    (folder / "logs").mkdir(parents=True)
    for number, name in enumerate(names):
        text = "".join(json.dumps(line) + "\n" for line in sessions()[name])
        (folder / "logs" / f"{number}-{name}.jsonl").write_text(text)
    (folder / "ingest").mkdir()
    figures = ingest(load_config(assignments=[f"ingest.path={folder / 'logs'}"]), {}, folder / "ingest")
    assert (figures["read"], figures["duplicates"], figures["turns"]) == (8, 0, len(DISTINCT) + sum(COPIES.values()))
    return folder / "ingest"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("corpora")
    names = list(sessions())
    return [write_corpus(folder / str(number), order) for number, order in enumerate((names, names[::-1]))]


def learnt(renderer: ChatRenderer, out: Path) -> Iterator[tuple[str, str]]:
    """(side, name) of each turn that has loss on it, as often as it has."""
    for side in SIDES:
        for row in pq.read_table(out / "sft" / f"{side}.parquet").to_pylist():
            text = renderer.tokenizer.decode([label for label in row["labels"] if label != IGNORED])
            yield from ((side, turn.partition(".")[0]) for turn in text.split("Turn ")[1:])


def test_real_rollouts_that_were_resumed_repeat_all_but_what_is_new(
    shared_trajectories: Path, model_dir: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    for file in (shared_trajectories / "codex-rollout").glob("*.jsonl"):
        lines = file.read_text().splitlines()
        is_new = '"payload"' in lines[0]
        header = json.loads(lines[0])
        (header["payload"] if is_new else header)["id"] = "resumed"
        added = [line["payload"] for line in codex_turn("new")]
        more = [{"type": "response_item", "payload": item} if is_new else item for item in added]
        goes_on = codex_session("", "Go on.", [])[1]
        more.insert(0, goes_on if is_new else goes_on["payload"])
        (logs / file.name).write_text("\n".join(lines) + "\n")
        (logs / f"resumed-{file.name}").write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
        with (logs / f"resumed-{file.name}").open("a") as end:
            end.writelines(json.dumps(line) + "\n" for line in more)
    (tmp_path / "ingest").mkdir()
    figures = ingest(load_config(assignments=[f"ingest.path={logs}"]), {}, tmp_path / "ingest")
    given_pair = {"prompt": "Ask.", "chosen": "Yes.", "rejected": "No."}
    (tmp_path / "given.jsonl").write_text(json.dumps(given_pair) + "\n")
    miner = ["datasets.preference.miners=[given]", f"datasets.preference.given={tmp_path / 'given.jsonl'}"]
    build(tmp_path / "ingest", model_dir, tmp_path / "out", *miner, "datasets.split.held_out=0")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["repeated_turns"] == {"codex-rollout": 35 + 3}
    made = report["sft_samples"] + report["dropped_samples"].get("too long", 0)
    assert made == figures["turns"] - (35 + 3) == 36 + 4


@pytest.mark.parametrize("style", ["blocks", "native"])
def test_each_turn_of_resumed_and_forked_sessions_is_learnt_once_in_any_order_of_files(
    style: str, corpora: list[Path], model_dir: Path, tmp_path: Path, renderer: ChatRenderer
) -> None:
    found = []
    for number, corpus in enumerate(corpora):
        out = tmp_path / str(number)
        build(corpus, model_dir, out, f"datasets.sft.style={style}", "datasets.split.held_out=0.3")
        turns = list(learnt(renderer, out))
        assert Counter(name for _, name in turns) == dict.fromkeys(DISTINCT, 1)
        found.append({name for _, name in turns})
        report = json.loads((out / "report.json").read_text())
        assert report["repeated_turns"] == COPIES
        assert report["repeated_trajectories"] == 3  # one, opened, claude: the beginnings of others
        samples = report["sft_samples"] + report["sft_held_out"]
        assert samples == (len(DISTINCT) if style == "blocks" else 8 - 3)
        assert "| codex-rollout | 10 |" in (out / "report.md").read_text()
    assert found[0] == found[1]


def test_the_beginning_of_a_resumed_session_is_context_without_loss(
    corpora: list[Path], model_dir: Path, tmp_path: Path, renderer: ChatRenderer
) -> None:
    build(corpora[0], model_dir, tmp_path / "out", "datasets.sft.style=native", "datasets.split.held_out=0")
    rows = {row["case"]: row for row in pq.read_table(tmp_path / "out" / "sft" / "train.parquet").to_pylist()}
    forked = rows["2-forked"]
    text = renderer.tokenizer.decode(forked["input_ids"])
    assert all(f"Turn {name}." in text and f"seen {name}" in text for name in ("a1", "a2"))
    in_loss = renderer.tokenizer.decode([label for label in forked["labels"] if label != IGNORED])
    assert "Turn c3." in in_loss and "Turn c4." in in_loss and "Turn a" not in in_loss


def test_sessions_that_share_turns_lie_on_one_side_and_a_recovery_they_share_is_one_pair(
    corpora: list[Path], model_dir: Path, tmp_path: Path, renderer: ChatRenderer
) -> None:
    held = set()
    for seed in range(4):
        out = tmp_path / str(seed)
        build(corpora[0], model_dir, out, "datasets.split.held_out=0.3", f"datasets.split.seed={seed}")
        side_of = {name: side for side, name in learnt(renderer, out)}
        assert len({side_of[name] for name in DISTINCT if name[0] in "abcd"}) == 1
        assert len({side_of[name] for name in DISTINCT if name[0] == "p"}) == 1
        held.add(frozenset(name[0] for name, side in side_of.items() if side == "held_out"))
        report = json.loads((out / "report.json").read_text())
        assert report["split"]["groups_train"] + report["split"]["groups_held_out"] == 3
        assert report["dropped_pairs"]["duplicate of a pair"] == 1  # a2 > a3 of the resumed session
    assert len(held) > 1


def test_every_turn_counts_each_time_where_that_is_asked_for(
    corpora: list[Path], model_dir: Path, tmp_path: Path, renderer: ChatRenderer
) -> None:
    build(corpora[0], model_dir, tmp_path / "out", "datasets.sft.repeated_turns=every")
    counts = Counter(name for _, name in learnt(renderer, tmp_path / "out"))
    assert counts.total() == len(DISTINCT) + sum(COPIES.values())
    assert (counts["a1"], counts["a3"], counts["p3"], counts["z0"]) == (5, 2, 2, 1)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["repeated_turns"] == {}


def test_only_runs_that_are_learnt_from_take_a_turn_from_others(
    make_run: Make, ingested: Callable[[list[Trajectory]], Path], model_dir: Path, tmp_path: Path
) -> None:
    steps = [("ls", 0), ("sed a", 1), ("sed b", 0)]
    longer = make_run("c", "a", [*steps, ("cat", 0)], "unresolved")
    corpus = ingested([longer, make_run("c", "b", steps, "resolved")])
    build(corpus, model_dir, tmp_path / "out", "datasets.sft.outcomes=resolved", "datasets.split.held_out=0")
    table = pq.read_table(tmp_path / "out" / "sft" / "train.parquet")
    assert table["trajectory_id"].to_pylist() == ["c-b"] * 3
    assert json.loads((tmp_path / "out" / "report.json").read_text())["repeated_turns"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("style", ["blocks", "native"])
@pytest.mark.usefixtures("small_jobs")
def test_two_processes_write_the_same_bytes(style: str, corpora: list[Path], model_dir: Path, tmp_path: Path) -> None:
    settings = [f"datasets.sft.style={style}", "datasets.split.held_out=0.3"]
    alone = build(corpora[0], model_dir, tmp_path / "alone", "datasets.workers=1", *settings)
    assert build(corpora[0], model_dir, tmp_path / "together", "datasets.workers=2", *settings) == alone


def test_a_key_is_what_the_model_sees(make_run: Make) -> None:
    def keys(run: Trajectory) -> list[int]:
        return turn_keys(run, learnable_turns(run))

    steps = [("ls", 0), ("cat x", 1), ("cat y", 0)]
    one = keys(make_run("c", "a", steps))
    renumbered = make_run("c", "b", steps)
    for message in renumbered.messages:
        message.call_id = message.returncode = None
        for action in message.actions:
            action.call_id = "another"
    assert keys(renumbered) == one
    other_end = keys(make_run("c", "b", [*steps[:2], ("cat z", 0)]))
    assert other_end[:2] == one[:2] and other_end[2] != one[2]
    assert not set(keys(make_run("c", "b", steps, task="Break it."))) & set(one)
    assert keys(make_run("c", "b", steps, output="else"))[0] == one[0]
    assert not set(keys(make_run("c", "b", steps, output="else"))[1:]) & set(one)
    toolless = make_run("c", "b", steps)
    toolless.tools = []
    assert not set(keys(toolless)) & set(one)
    unshown = make_run("c", "b", steps)
    unshown.messages[4].trainable = False
    assert keys(unshown) == [one[0], one[2]]


runs = st.lists(st.tuples(st.lists(st.sampled_from("xyz"), max_size=5).map(tuple), st.booleans()), max_size=12)


@given(runs=runs, data=st.data())
def test_of_any_runs_each_distinct_turn_is_learnt_in_one_whatever_their_order(
    runs: list[tuple[tuple[str, ...], bool]], data: st.DataObject
) -> None:
    def prefixes(run: tuple[str, ...]) -> list[tuple[str, ...]]:
        return [run[: end + 1] for end in range(len(run))]

    key_of = {prefix: zlib.crc32(repr(prefix).encode()) for run, _ in runs for prefix in prefixes(run)}
    outcomes = []
    for order in (runs, data.draw(st.permutations(runs))):
        turns = TurnKeys()
        for run, is_candidate in order:
            turns.add([key_of[prefix] for prefix in prefixes(run)], is_candidate)
        repeats = turns.settle()
        learners: dict[tuple[str, ...], tuple[tuple[str, ...], bool]] = {}
        for number, (run, is_candidate) in enumerate(order):
            assert repeats.turns(number) == len(run)
            own = [prefix for at, prefix in enumerate(prefixes(run)) if at not in repeats.of(number)]
            assert not learners.keys() & set(own)
            learners |= dict.fromkeys(own, (run, is_candidate))
        assert learners.keys() == key_of.keys()
        for prefix, (run, is_candidate) in learners.items():
            sharing = [(other[1], len(other[0])) for other in runs if other[0][: len(prefix)] == prefix]
            assert (is_candidate, len(run)) == max(sharing)
        joined = {frozenset((order[one][0], order[other][0])) for one, other in repeats.links}
        outcomes.append((learners, joined))
    assert outcomes[0] == outcomes[1]
