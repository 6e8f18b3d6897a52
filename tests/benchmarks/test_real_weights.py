"""The demonstration on a real model, here the embedded one on the CPU: every section, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from traceforge_core.config import load_config
from traceforge_core.datasets.budget import left_out_marker
from traceforge_core.datasets.corpus import Corpus
from traceforge_core.datasets.messages import messages_from_json
from traceforge_core.modeling.chat import ChatRenderer, load_renderer
from traceforge_core.modeling.prepare import prepare_model
from traceforge_core.trajectories.ingest import ingest
from traceforge_core.trajectories.model import Message, Trajectory

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from real_weights import CLIP, shortened_recoveries

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "real_weights.py"
Given = tuple[list[Message], Trajectory, int]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder after a whole run, and what was printed. 1,024 tokens are fewer than some histories have."""
    work = tmp_path_factory.mktemp("demonstration")
    (work / "images").mkdir()
    done = run("--work", str(work), "--steps", "10", "--max-length", "1024")
    assert done.returncode == 0, done.stderr[-3000:]
    return work, done.stdout


@pytest.mark.slow
def test_both_strategies_learn_the_trained_pairs_alike(demonstrated: tuple[Path, str]) -> None:
    result = json.loads((demonstrated[0] / "real-weights.json").read_text())["float32"]
    losses = [result["strategies"][name]["losses"] for name in ("oracle", "branch_parallel")]
    assert [len(curve) for curve in losses] == [10, 10]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert result["compare"]["verdict"] == "pass"
    trained = result["pairs"]["train"]
    for name in ("oracle", "branch_parallel"):
        assert trained[name]["margin"] > trained["base"]["margin"] + 0.1
        assert trained[name]["loss"] < trained["base"]["loss"]


@pytest.mark.slow
def test_held_out_pairs_are_of_cases_that_no_trained_pair_is_of(demonstrated: tuple[Path, str]) -> None:
    result = json.loads((demonstrated[0] / "real-weights.json").read_text())["float32"]
    trained, held_out = result["cases"]["train"], result["cases"]["held_out"]
    assert trained and held_out and not set(trained) & set(held_out)
    assert sum(held_out.values()) == result["pairs"]["held_out"]["base"]["pairs"]


@pytest.mark.slow
def test_the_table_has_each_model_before_and_after_and_the_plot_is_there(demonstrated: tuple[Path, str]) -> None:
    work, printed = demonstrated
    rows = [line for line in printed.splitlines() if line.startswith("| float32 |")]
    assert len(rows) == 7
    assert [sum(name in row for row in rows) for name in ("| before |", "oracle (TRL)", "Branch-Parallel")] == [2, 2, 2]
    assert (work / "images" / "real-weights.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_section_takes_up_what_is_there_and_trains_nothing_again(demonstrated: tuple[Path, str]) -> None:
    work, _ = demonstrated
    before = (work / "runs" / "float32" / "oracle" / "manifest.json").stat().st_mtime_ns
    done = run("--work", str(work), "--steps", "10", "--max-length", "1024", "--sections", "train,measure,report")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (work / "runs" / "float32" / "oracle" / "manifest.json").stat().st_mtime_ns == before


def test_an_unknown_section_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    done = run("--work", str(tmp_path), "--sections", "train,nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr and "measure" in done.stderr


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("ingest")
    ingest(load_config(), {}, folder)
    return Corpus(folder)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """The embedded model's own tokenizer, which has seen the samples: their tasks have about 500 tokens, the longest
    histories before a failed turn about 1,200."""
    folder = tmp_path_factory.mktemp("model")
    prepare_model(load_config(), {}, folder)
    return load_renderer(folder)


def given_pairs(corpus: Corpus, renderer: ChatRenderer, max_length: int) -> list[Given]:
    """The shortened recoveries, each with its trajectory and the position of the turn that failed; all fit."""
    whole = {trajectory.trajectory_id: trajectory for trajectory in corpus}
    found = []
    for row in shortened_recoveries(corpus, renderer, max_length):
        prompt, chosen, rejected = (messages_from_json(row[name]) for name in ("prompt", "chosen", "rejected"))
        trajectory_id, _, failed = row["id"].rpartition("#")
        trajectory = whole[trajectory_id]
        assert rejected[0].actions[0].arguments == trajectory.messages[int(failed)].actions[0].arguments
        for side in (chosen, rejected):
            encoded = renderer.encode_completion(prompt, side, row["tools"])
            assert len(encoded.prompt_ids) + len(encoded.completion_ids) <= max_length
        found.append((prompt, trajectory, int(failed)))
    return found


@pytest.mark.slow
def test_shortened_recoveries_keep_the_task_and_the_latest_turns_and_say_how_much_is_left_out(
    samples: Corpus, renderer: ChatRenderer
) -> None:
    pairs = given_pairs(samples, renderer, 1150)
    assert pairs
    for prompt, trajectory, failed in pairs:
        head, left_out = trajectory.turns[0], failed - len(prompt)
        assert left_out > 0
        assert prompt[head - 1].content == f"{trajectory.messages[head - 1].content}\n\n{left_out_marker(left_out)}"
        assert prompt[head:] == trajectory.messages[head + left_out : failed]
        assert prompt[head].role == "assistant"


@pytest.mark.slow
def test_where_the_task_does_not_fit_the_latest_turn_stays_with_clipped_observations(
    samples: Corpus, renderer: ChatRenderer
) -> None:
    pairs = given_pairs(samples, renderer, 450)
    assert pairs
    for prompt, trajectory, failed in pairs:
        assert prompt[0].content == left_out_marker(failed - len(prompt) + 1)
        latest = trajectory.messages[failed - len(prompt) + 1 : failed]
        assert [message.role for message in prompt[1:]] == [message.role for message in latest]
        assert prompt[1].role == "assistant"
        for kept, original in zip(prompt[2:], latest[1:], strict=True):
            if len(original.content) <= CLIP:
                assert kept.content == original.content
            else:
                assert kept.content.startswith(original.content[: CLIP // 2])
                assert f"{len(original.content) - CLIP} characters left out" in kept.content


def test_recoveries_whose_whole_history_fits_are_left_to_the_miner(samples: Corpus, renderer: ChatRenderer) -> None:
    assert given_pairs(samples, renderer, 4096) == []
