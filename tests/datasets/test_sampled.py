"""Turns drawn from a policy: which rule faults them, which pairs they make, and the drawing itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from traceforge_core.config import PreferenceDataConfig, load_config
from traceforge_core.datasets.build import build_datasets
from traceforge_core.datasets.corpus import Corpus
from traceforge_core.datasets.drawing import generate
from traceforge_core.datasets.preference import preference_pairs
from traceforge_core.datasets.sampled import fault_of, merit_of, sampled_candidates
from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.chat import ChatRenderer
from traceforge_core.modeling.prepare import prepare_model
from traceforge_core.modeling.tiny import tiny_model
from traceforge_core.trajectories.model import Action, Message, Trajectory

Make = Callable[..., Trajectory]
STEPS = [("ls", 0), ("sed a", 1), ("sed b", 0)]


def settings(max_length: int = 4096, **sampled: Any) -> PreferenceDataConfig:
    return PreferenceDataConfig.model_validate({"max_length": max_length, "sampled": sampled})


def call(name: str, arguments: Any) -> str:
    return f"Well.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (call("bash", {"command": "pytest"}), None),
        (call("bash", {"command": "ls"}), None),  # it worked the first time
        (call("bash", {"command": " sed a\n"}), "repeats a failed call"),
        (call("bash", {"command": "x"}) + call("bash", {"command": "sed a"}), "repeats a failed call"),
        (call("python", {"command": "x"}), "does not parse"),
        (call("bash", "sed a"), "does not parse"),
        ("I am done.", "does not parse"),
        ("", "does not parse"),
        ("<tool_call>\n{torn\n</tool_call>", "does not parse"),
        ("<tool_call>\n[1]\n</tool_call>", "does not parse"),
        (call("bash", {"command": "x"}) + "<tool_call>", "does not parse"),
    ],
)
def test_faults_of_tool_calls(make_run: Make, text: str, fault: str | None) -> None:
    run = make_run("c", "r", STEPS)
    assert fault_of(text, run.messages[:6], run.messages[6], run.tools) == fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("THOUGHT: x\n\n```bash\nls -la\n```", None),
        ("Again.\n\n```bash\nls testbed\n```\n", "repeats a failed call"),
        ("No block.", "does not parse"),
        ("```bash\na\n```\n```bash\nb\n```", "does not parse"),
    ],
)
def test_faults_of_commands_in_the_text(text: str, fault: str | None) -> None:
    def turn(command: str, code: int) -> list[Message]:
        action = Action("bash", {"command": command}, in_text=True)
        return [
            Message("assistant", f"```bash\n{command}\n```", actions=[action]),
            Message("user", "", returncode=code),
        ]

    messages = [Message("user", "task"), *turn("ls testbed", 2), *turn("ls", 0)]
    assert fault_of(text, messages[:3], messages[3], []) == fault


def test_a_faulty_drawn_turn_stands_against_the_recorded_one_as_it_was_written(
    renderer: ChatRenderer, make_run: Make, ingested: Callable[[list[Trajectory]], Path]
) -> None:
    run = make_run("c", "r", STEPS)
    corpus = Corpus(ingested([run]))
    texts = ["I give up.<|im_end|>", call("bash", {"command": "new"}) + "<|im_end|>", "cut o"]
    seen: list[Sequence[Sequence[int]]] = []

    def draw(prompts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        seen.append(prompts)
        return [renderer.tokens(texts) for _ in prompts]

    dropped: Counter[str] = Counter()
    candidates = sampled_candidates(corpus, renderer, settings(new_tokens=50, sides=["rejected"]), draw, dropped)
    assert dropped == {"sampled: no fault found": 2, "sampled: did not end": 2}
    expected = [
        renderer.encode_completion(run.messages[:t], [run.messages[t]], run.tools).prompt_ids.tolist() for t in (2, 6)
    ]
    assert seen == [expected]  # the turn that failed is not one to be chosen
    pairs = list(preference_pairs([("c", [candidates])], renderer, PreferenceDataConfig(), dropped))
    assert [pair.chosen for pair in pairs] == [[run.messages[2]], [run.messages[6]]]
    for pair in pairs:
        assert pair.miner == "sampled"
        assert renderer.tokenizer.decode(pair.rejected_ids.tolist()) == "I give up.<|im_end|>"
        assert pair.rejected_mask.all()


@pytest.mark.parametrize(
    ("text", "merit"),
    [
        (call("bash", {"command": "sed b\n"}), "makes the call that worked"),
        (call("bash", {"command": "sed c"}), None),  # perhaps good, but nothing says so
        (call("bash", {"command": "sed a"}), None),
        (call("bash", {"command": "sed b"}) + call("bash", {"command": "ls"}), None),
        ("sed b", None),
    ],
)
def test_merits_of_a_turn_in_the_place_of_one_that_failed(make_run: Make, text: str, merit: str | None) -> None:
    messages = make_run("c", "r", STEPS).messages
    assert merit_of(text, messages[:4], messages[4], messages[6], make_run("c", "r", STEPS).tools) == merit


def test_a_drawn_turn_that_makes_the_call_that_worked_is_chosen_against_the_recorded_failure(
    renderer: ChatRenderer, make_run: Make, ingested: Callable[[list[Trajectory]], Path]
) -> None:
    run = make_run("c", "r", STEPS)
    run.messages[6].content = "The last command failed."  # keeps it out of `recovery`, and does not matter here
    good = call("bash", {"command": "sed b"})
    drawn = [renderer.tokens([good + "<|im_end|>", "No call.<|im_end|>"])]
    dropped: Counter[str] = Counter()
    candidates = sampled_candidates(
        Corpus(ingested([run])), renderer, settings(sides=["chosen"]), lambda prompts: drawn[: len(prompts)], dropped
    )
    assert dropped == {"sampled: not known to be good": 1}
    (pair,) = preference_pairs([("c", [candidates])], renderer, PreferenceDataConfig(), dropped)
    assert pair.rejected == [run.messages[4]] and pair.rejected_trajectory == "c-r"
    assert [message.content for message in pair.chosen] == [good]
    assert pair.chosen_trajectory == "c-r/drawn-0"
    assert renderer.tokenizer.decode(pair.chosen_ids.tolist()) == good + "<|im_end|>"
    assert pair.chosen_mask.all() and pair.prompt == run.messages[:4]


def test_histories_are_spread_and_those_too_long_to_draw_at_are_counted(
    renderer: ChatRenderer, make_run: Make, ingested: Callable[[list[Trajectory]], Path]
) -> None:
    corpus = Corpus(ingested([make_run(f"c{n}", "r", [("ls", 0)] * 3) for n in range(6)]))
    counts = []

    def draw(prompts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        counts.append(len(prompts))
        return [[] for _ in prompts]

    dropped: Counter[str] = Counter()
    sampled_candidates(corpus, renderer, settings(histories=6), draw, dropped)
    assert (counts, dropped) == ([6], {})
    assert sampled_candidates(corpus, renderer, settings(600, histories=6), draw, dropped) == []
    assert (counts, dropped) == ([6], {"sampled: too long to draw at": 6})


def test_a_batch_writes_what_each_prompt_alone_would(renderer: ChatRenderer) -> None:
    model = tiny_model(renderer.tokenizer)
    prompts = renderer.tokens(["a", "def longer(prompt):", "x = 1"])
    end = renderer.tokenizer.convert_tokens_to_ids(renderer.end_of_turn)
    options: dict[str, Any] = {"end_id": end, "pad_id": 0, "new_tokens": 6, "temperature": 0.0, "seed": 0}
    together = generate(model, prompts, **options)
    assert together == [generate(model, [prompt], **options)[0] for prompt in prompts]
    assert all(1 <= len(turn) <= 6 for turn in together)
    options["temperature"] = 1.0
    assert generate(model, prompts, **options) == generate(model, prompts, **options)
    assert generate(model, prompts, **options) != generate(model, prompts, **{**options, "seed": 1})
    options["end_id"] = generate(model, prompts[:1], **options)[0][2]
    assert generate(model, prompts[:1], **options)[0][-1] == options["end_id"]


@pytest.mark.slow
def test_the_stage_draws_in_a_process_of_its_own(
    make_run: Make, ingested: Callable[[list[Trajectory]], Path], tmp_path: Path
) -> None:
    folder = ingested([make_run(f"c{n}", "r", STEPS) for n in range(3)])
    sampled = "datasets.preference.sampled"
    config = load_config(
        assignments=[
            "datasets.preference.miners=[recovery, sampled]",
            f"{sampled}.histories=4",
            f"{sampled}.draws=2",
            f"{sampled}.new_tokens=5",
        ]
    )
    for name in ("model", "out"):
        (tmp_path / name).mkdir()
    prepare_model(config, {}, tmp_path / "model")
    inputs = {"ingest": folder, "model": tmp_path / "model"}
    figures = build_datasets(config, inputs, tmp_path / "out")
    drawn = {reason: count for reason, count in figures["dropped"].items() if reason.startswith("sampled")}
    assert sum(drawn.values()) + figures["candidates_by_miner"]["sampled"] == 4 * 2
    config.datasets.preference.sampled.adapter = str(tmp_path / "nowhere")
    with pytest.raises(TraceForgeError, match=r"no adapter in .*datasets\.preference\.sampled\.adapter"):
        build_datasets(config, inputs, tmp_path / "out")
