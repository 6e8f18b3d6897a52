"""The stage from ingested trajectories to both datasets, on made-up runs and on real ones."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from traceforge_core.config import RunConfig, load_config
from traceforge_core.datasets.build import build_datasets
from traceforge_core.datasets.messages import messages_from_json
from traceforge_core.datasets.parquet import PREFERENCE_SCHEMA, SFT_SCHEMA
from traceforge_core.datasets.report import prove_no_leak
from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.chat import ChatRenderer
from traceforge_core.trajectories.ingest import ingest
from traceforge_core.trajectories.model import Trajectory

Make = Callable[..., Trajectory]
SIDES = ("train", "held_out")


def settings(*assignments: str) -> RunConfig:
    base = ["datasets.sft.max_length=32768", "datasets.sft.max_samples=null", "datasets.preference.max_length=81920"]
    return load_config(assignments=base + list(assignments))


def build(ingest_dir: Path, model_dir: Path, out_dir: Path, *assignments: str) -> dict[str, Any]:
    out_dir.mkdir()
    return build_datasets(settings(*assignments), {"ingest": ingest_dir, "model": model_dir}, out_dir)


def rows(out_dir: Path, folder: str, side: str) -> list[dict[str, Any]]:
    return pq.read_table(out_dir / folder / f"{side}.parquet").to_pylist()


def test_the_files_hold_what_the_figures_say(corpus: Path, model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    figures = build(corpus, model_dir, out, "datasets.split.held_out=0.25")
    assert figures["sft_samples"] == len(rows(out, "sft", "train")) == 6 * 5
    assert figures["sft_held_out"] == len(rows(out, "sft", "held_out")) == 2 * 5
    assert figures["pairs"] == len(rows(out, "preference", "train")) == 6 * 2
    assert figures["pairs_held_out"] == len(rows(out, "preference", "held_out")) == 2 * 2
    assert figures["pairs_by_miner"] == figures["candidates_by_miner"] == {"outcome": 8, "recovery": 8}
    assert figures["dropped"] == {}
    assert pq.read_schema(out / "sft" / "train.parquet") == SFT_SCHEMA
    assert pq.read_schema(out / "preference" / "train.parquet") == PREFERENCE_SCHEMA
    report = json.loads((out / "report.json").read_text())
    assert {name: report[name] for name in figures} == figures
    assert report["split"]["cases_train"] == 6
    assert report["split"]["cases_on_both_sides"] == 0
    assert "| recovery | 8 | 8 |" in (out / "report.md").read_text()
    json.dumps(figures)


def test_every_row_is_sound(corpus: Path, model_dir: Path, tmp_path: Path, renderer: ChatRenderer) -> None:
    out = tmp_path / "out"
    build(corpus, model_dir, out)
    for side in SIDES:
        for row in rows(out, "sft", side):
            assert row["tokens"] == len(row["input_ids"]) == len(row["labels"])
            assert renderer.tokenizer.decode(row["input_ids"]) == row["prompt"] + row["completion"]
        for row in rows(out, "preference", side):
            prompt, tools = messages_from_json(row["prompt"]), json.loads(row["tools"])
            for branch in ("chosen", "rejected"):
                encoded = renderer.encode_completion(prompt, messages_from_json(row[branch]), tools)
                assert encoded.prompt_ids.tolist() == row["prompt_ids"]
                assert encoded.completion_ids.tolist() == row[f"{branch}_ids"]
                assert encoded.completion_mask.tolist() == row[f"{branch}_mask"]


def test_the_same_input_gives_the_same_bytes(corpus: Path, model_dir: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        build(corpus, model_dir, tmp_path / name)
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.*") if path.is_file()]
    assert len(files) == 6
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_at_most_max_samples_spread_over_all_runs(corpus: Path, model_dir: Path, tmp_path: Path) -> None:
    figures = build(corpus, model_dir, tmp_path / "out", "datasets.sft.max_samples=8")
    assert figures["sft_samples"] + figures["sft_held_out"] == 8
    assert figures["dropped"] == {"over max_samples": 32}
    found = [row["case"] for side in SIDES for row in rows(tmp_path / "out", "sft", side)]
    assert len(set(found)) >= 7


def test_samples_that_do_not_fit_are_made_up_for_by_others(
    make_run: Make, ingested: Callable[[list[Trajectory]], Path], model_dir: Path, tmp_path: Path
) -> None:
    long = [(f"cat {'very-long-name ' * 400}", 0)]
    runs = [make_run(f"case{n}", "a", long if n % 5 else [("ls", 0)], "resolved") for n in range(30)]
    runs += [make_run("case0", "b", [("cat x", 1)], "unresolved")]
    corpus = ingested(runs)
    whole = build(corpus, model_dir, tmp_path / "whole", "datasets.sft.max_length=512", "datasets.split.held_out=0")
    assert whole["sft_samples"] > 6 and whole["dropped"]["too long"] == 24
    asked = build(
        corpus, model_dir, tmp_path / "asked",
        "datasets.sft.max_length=512", "datasets.split.held_out=0", "datasets.sft.max_samples=6",
    )  # fmt: skip
    assert asked["sft_samples"] == 6
    assert sum(asked["dropped"].values()) + 6 == whole["sft_samples"] + whole["dropped"]["too long"]


def test_nothing_held_out_leaves_empty_files(corpus: Path, model_dir: Path, tmp_path: Path) -> None:
    figures = build(corpus, model_dir, tmp_path / "out", "datasets.split.held_out=0")
    assert (figures["sft_held_out"], figures["pairs_held_out"]) == (0, 0)
    assert rows(tmp_path / "out", "sft", "held_out") == []
    assert figures["pairs"] == 16


def test_given_pairs_join_the_mined_ones(corpus: Path, model_dir: Path, tmp_path: Path) -> None:
    given = tmp_path / "given.jsonl"
    lines = [json.dumps({"prompt": f"p{n}", "chosen": "yes", "rejected": "no"}) for n in range(6)]
    given.write_text("\n".join([*lines, "{torn"]))
    figures = build(
        corpus,
        model_dir,
        tmp_path / "out",
        "datasets.preference.miners=[given, recovery]",
        f"datasets.preference.given={given}",
    )
    assert figures["pairs_by_miner"] == {"given": 6, "recovery": 8}
    assert figures["dropped"] == {"given: unreadable line": 1}


def test_a_leak_would_be_found(corpus: Path, model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build(corpus, model_dir, out)
    config = settings().datasets
    prove_no_leak(out, config)
    leaked = pq.read_table(out / "sft" / "train.parquet").slice(0, 1)
    pq.write_table(leaked, out / "sft" / "held_out.parquet")
    with pytest.raises(TraceForgeError, match="The split leaks: case"):
        prove_no_leak(out, config)


def outcome_pairs_by_hand(folder: Path) -> dict[str, int]:
    """Resolved × unresolved runs of one case whose raw messages are equal up to the first assistant message. An empty
    patch is an answer that did not resolve the case; a run that the harness failed on has no label."""
    labels: dict[tuple[str, str], str] = {}
    for file in folder.glob("*/*.eval.json"):
        report = json.loads(file.read_text())
        for label, lists in (("resolved", ["resolved_ids"]), ("unresolved", ["unresolved_ids", "empty_patch_ids"])):
            labels |= {(file.parent.name, case): label for name in lists for case in report[name]}
    groups: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for file in folder.glob("*/*/*.traj.json"):
        run, case = file.parts[-3:-1]
        messages = json.loads(file.read_text())["messages"]
        first = next(n for n, message in enumerate(messages) if message["role"] == "assistant")
        prompt = json.dumps([(message["role"], message["content"]) for message in messages[:first]])
        groups[case, prompt][labels.get((run, case), "none")] += 1
    found: Counter[str] = Counter()
    for (case, _), count in groups.items():
        found[case] += count["resolved"] * count["unresolved"]
    return dict(found)


@pytest.mark.slow
def test_on_real_runs_the_outcome_pairs_are_those_that_the_prompt_rule_gives(
    shared_trajectories: Path, model_dir: Path, tmp_path: Path
) -> None:
    runs = shared_trajectories / "swebench-runs"
    config = settings(f"ingest.path={runs}", "datasets.preference.max_pairs_per_case=1000")
    config.datasets.preference.near_duplicate = 1.0
    config.datasets.preference.max_length = 10_000_000
    config.datasets.sft.max_samples = 20
    (tmp_path / "ingest").mkdir()
    ingest(config, {}, tmp_path / "ingest")
    out = tmp_path / "out"
    out.mkdir()
    figures = build_datasets(config, {"ingest": tmp_path / "ingest", "model": model_dir}, out)
    by_hand = outcome_pairs_by_hand(runs)
    assert figures["candidates_by_miner"]["outcome"] == sum(by_hand.values()) > 0
    made = Counter(row["case"] for side in SIDES for row in rows(out, "preference", side) if row["miner"] == "outcome")
    assert made == Counter({case: count for case, count in by_hand.items() if count})
    assert figures["dropped"]["over max_samples"] == 786
    assert figures["dropped"].keys() == {"over max_samples", "recovery: refers to what the prompt does not show"}
