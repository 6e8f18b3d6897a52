"""SFT samples: what stands in them, what is learned, what is trimmed and what is dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from traceforge_core.config import SftDataConfig
from traceforge_core.datasets.sample import IGNORED, SftSample
from traceforge_core.datasets.sft import sft_samples
from traceforge_core.modeling.chat import ChatRenderer
from traceforge_core.modeling.template_choice import own_template
from traceforge_core.trajectories.model import Action, Message, Trajectory

Make = Callable[..., Trajectory]
STEPS = [("ls", 0), ("cat x", 1), ("cat y", 0), ("submit", 0)]


def build(
    renderer: ChatRenderer, runs: list[Trajectory], keep: Callable[[int], bool] = lambda number: True, **settings: Any
) -> tuple[list[SftSample], dict[str, int]]:
    dropped: Counter[str] = Counter()
    samples = list(sft_samples(runs, renderer, SftDataConfig(**settings), keep, dropped))
    return samples, {reason: count for reason, count in dropped.items() if count}


def learned(renderer: ChatRenderer, sample: SftSample) -> str:
    return renderer.tokenizer.decode([label for label in sample.labels if label != IGNORED])


def test_blocks_give_one_sample_a_turn_with_the_history_in_one_user_message(
    renderer: ChatRenderer, make_run: Make
) -> None:
    samples, dropped = build(renderer, [make_run("c", "r", STEPS)])
    assert [sample.turn for sample in samples] == [2, 4, 6, 8]
    assert dropped == {}
    second = samples[1]
    content = (
        "Case: c\n\n[SYSTEM #0]\nYou work in a shell.\n\n[USER #1]\nMend it. (c)\n\n"
        "[ASSISTANT #2]\n<think>\nWhy 0\n</think>\n\nStep 0.\n<tool_call>\n"
        '{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>\n\n'
        "[TOOL #3]\n<returncode>0</returncode>\n<output>\nout\n</output>\n\nPredict next action."
    )
    tools = make_run("c", "r", []).tools
    assert second.prompt == renderer.render([Message("user", content)], tools, add_generation_prompt=True)
    assert second.completion == (
        '<think>\nWhy 1\n</think>\n\nStep 1.\n<tool_call>\n{"name": "bash", "arguments": {"command": "cat x"}}\n'
        "</tool_call><|im_end|>"
    )
    assert learned(renderer, second) == second.completion


def test_native_gives_one_sample_a_trajectory_with_loss_on_every_turn(renderer: ChatRenderer, make_run: Make) -> None:
    run = make_run("c", "r", STEPS)
    (sample,), _ = build(renderer, [run], style="native")
    encoded = renderer.encode(run.messages, run.tools)
    end = encoded.turns[-1].end
    assert np.array_equal(sample.input_ids, encoded.input_ids[:end])  # what stands behind the last turn teaches nothing
    assert [label != IGNORED for label in sample.labels] == [bool(mark) for mark in encoded.assistant_mask[:end]]
    assert renderer.tokenizer.decode(sample.input_ids) == sample.prompt + sample.completion
    assert sample.prompt.endswith("<|im_start|>assistant\n")


ends = st.sampled_from(
    ["", "\n", " ", "\t", ".", "a", "1", "\r\n", "é", "中", "{", "```", "  \n ", "...", "\x0c", " \n\n"]
)
bodies = st.text(alphabet=st.characters(codec="utf-8"), max_size=20)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(st.tuples(ends, bodies, ends).map("".join), min_size=2, max_size=9), data=st.data())
def test_pieces_give_the_very_tokens_of_the_whole_prompt(
    renderer: ChatRenderer, contents: list[str], data: st.DataObject
) -> None:
    roles = [data.draw(st.sampled_from(["user", "assistant", "tool"])) for _ in contents]
    messages = [Message(role, text) for role, text in zip(roles, contents, strict=True)]  # type: ignore[arg-type]
    samples, _ = build(renderer, [Trajectory("t", "case", "r", "f", "s", messages)])
    for sample in samples:
        border = len(sample.labels) - sum(label != IGNORED for label in sample.labels)
        assert sample.input_ids[:border].tolist() == renderer.tokens([sample.prompt])[0]
        assert sample.input_ids[border:].tolist() == renderer.tokens([sample.completion])[0]


@pytest.fixture(scope="module")
def gpt2_renderer(make_tokenizer: Any) -> ChatRenderer:
    """A tokenizer that splits white space as GPT-2 does: of a run of line ends, the last goes by itself."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokenizer = make_tokenizer(own_template("chatml"), "<|im_end|>", "<|im_start|>", "<|endoftext|>")
    tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    return ChatRenderer(tokenizer)


def test_the_cuts_also_fit_a_tokenizer_that_splits_white_space_as_gpt2_does(
    gpt2_renderer: ChatRenderer, make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("c", "r", [(f"command{n}", 0) for n in range(12)], output="long\n\n  text\n\n\n" * 20)
    run.messages[4] = replace(run.messages[4], content="One.\nTwo.\n\nThree.\n", trainable=False)
    longest = []
    real = gpt2_renderer.tokens
    monkeypatch.setattr(
        gpt2_renderer, "tokens", lambda pieces: longest.append(max(map(len, pieces), default=0)) or real(pieces)
    )
    for max_length in (100_000, 1500):
        longest.clear()
        samples, _ = build(gpt2_renderer, [run], max_length=max_length)
        assert [sample.turn for sample in samples] == [turn for turn in run.turns if turn != 4]
        assert sum(length > 3000 for length in longest) == 2, "the whole prompt is tokenised by the two checks only"
        for sample in samples:
            border = len(sample.labels) - sum(label != IGNORED for label in sample.labels)
            assert sample.input_ids[:border].tolist() == real([sample.prompt])[0]
            assert sample.input_ids[border:].tolist() == real([sample.completion])[0]
    assert samples[-1].trimmed_messages > 0


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    style=st.sampled_from(["blocks", "native"]),
    max_length=st.integers(60, 900),
)
def test_no_sample_is_too_long_and_no_completion_is_cut(
    renderer: ChatRenderer, make_run: Make, sizes: list[int], style: str, max_length: int
) -> None:
    run = make_run("c", "r", [("x " * size, 0) for size in sizes], output="y " * 20)
    whole, _ = build(renderer, [run], style=style, max_length=100_000)
    samples, dropped = build(renderer, [run], style=style, max_length=max_length)
    turns = sum(learned(renderer, sample).count("<|im_end|>") for sample in samples)
    assert turns + dropped.get("too long", 0) == len(sizes)
    for sample in samples:
        assert len(sample.input_ids) == len(sample.labels) <= max_length
        full = next(other for other in whole if style == "native" or other.sample_id == sample.sample_id)
        assert sample.completion in full.completion
        if style == "blocks":
            assert sample.completion == full.completion
        assert sample.completion.endswith("<|im_end|>")
        assert "You work in a shell." in sample.prompt
        assert "Mend it. (c)" in sample.prompt
        assert (f"[... {sample.trimmed_messages} message" in sample.prompt) == (sample.trimmed_messages > 0)
        if sample.sample_id == full.sample_id:
            assert (len(full.input_ids) <= max_length) == (sample.trimmed_messages == 0)
        assert renderer.tokenizer.decode(sample.input_ids) == sample.prompt + sample.completion


def test_trimming_keeps_system_prompt_task_and_the_latest_messages(renderer: ChatRenderer, make_run: Make) -> None:
    run = make_run("c", "r", [(f"command{n}", 0) for n in range(6)], output="long " * 30)
    samples, _ = build(renderer, [run], max_length=500)
    last = samples[-1]
    assert 0 < last.trimmed_messages < 10
    marker = f"[USER #1]\nMend it. (c)\n\n[... {last.trimmed_messages} messages left out ...]\n\n"
    assert marker + f"[{'ASSISTANT' if last.trimmed_messages % 2 == 0 else 'TOOL'} #" in last.prompt
    assert "[TOOL #11]" in last.prompt
    assert f" #{1 + last.trimmed_messages}]" not in last.prompt
    assert f" #{2 + last.trimmed_messages}]" in last.prompt


def test_native_trimming_leaves_out_whole_turns_with_their_observations(renderer: ChatRenderer, make_run: Make) -> None:
    run = make_run("c", "r", [(f"command{n}", 0) for n in range(6)], output="long " * 30)
    samples, _ = build(renderer, [run], style="native", max_length=600)
    sample = samples[0]
    assert sample.trimmed_messages > 0
    assert sample.trimmed_messages % 2 == 0
    first_kept = sample.trimmed_messages // 2
    assert f"Mend it. (c)\n\n[... {sample.trimmed_messages} messages left out ...]<|im_end|>" in sample.prompt
    assert learned(renderer, sample).startswith(f"<think>\nWhy {first_kept}\n")
    assert learned(renderer, sample).count("<|im_end|>") == 6 - first_kept
    assert len(samples) > 1 and len({other.sample_id for other in samples}) == len(samples)
    before = samples[1]
    assert before.sample_id == f"c-r#to-{2 * first_kept}" and f"[TOOL #{2 * first_kept}" not in before.prompt
    together = "".join(learned(renderer, other) for other in reversed(samples))
    assert together == learned(renderer, build(renderer, [run], style="native")[0][0])


def test_what_fits_in_no_way_is_dropped_and_counted(renderer: ChatRenderer, make_run: Make) -> None:
    run = make_run("c", "r", [("ls", 0), ("x " * 500, 0)])
    for style, kept, lost in (("blocks", 1, 1), ("native", 1, 1)):
        samples, dropped = build(renderer, [run], style=style, max_length=400)
        assert len(samples) == kept
        assert dropped == {"too long": lost}


@pytest.mark.parametrize("style", ["blocks", "native"])
def test_turns_that_must_not_be_learned_stay_in_the_history_and_out_of_the_loss(
    renderer: ChatRenderer, make_run: Make, style: str
) -> None:
    run = make_run("c", "r", STEPS)
    run.messages[4] = replace(run.messages[4], content="NEVER", trainable=False)
    for loss_on in ("completion", "everything"):
        samples, _ = build(renderer, [run], style=style, loss_on=loss_on)
        assert 4 not in [sample.turn for sample in samples]
        assert "NEVER" in samples[-1].prompt + samples[-1].completion
        assert "NEVER" not in learned(renderer, samples[-1])


@pytest.mark.parametrize("style", ["blocks", "native"])
def test_loss_on_everything_takes_in_the_prompt(renderer: ChatRenderer, make_run: Make, style: str) -> None:
    samples, _ = build(renderer, [make_run("c", "r", STEPS)], style=style, loss_on="everything")
    for sample in samples:
        assert np.array_equal(sample.labels, sample.input_ids)


def test_only_resolved_runs_when_asked_for(renderer: ChatRenderer, make_run: Make) -> None:
    runs = [
        make_run("c", run, STEPS, outcome) for run, outcome in (("a", "resolved"), ("b", "unresolved"), ("c", None))
    ]
    samples, _ = build(renderer, runs, outcomes="resolved")
    assert {sample.trajectory_id for sample in samples} == {"c-a"}
    assert len(build(renderer, runs)[0]) == 12


def test_only_the_wanted_candidates_are_made_and_the_rest_is_counted(renderer: ChatRenderer, make_run: Make) -> None:
    runs = [make_run("c", run, STEPS) for run in "abc"]
    samples, dropped = build(renderer, runs, keep=lambda number: number % 5 == 1)
    assert [sample.sample_id for sample in samples] == ["c-a#4", "c-b#6", "c-c#8"]
    assert dropped == {"over max_samples": 9}


def test_empty_turns_and_runs_without_turns_give_no_sample(renderer: ChatRenderer) -> None:
    head = [Message("system", "s"), Message("user", "u")]
    empty = Trajectory("t", "c", "r", "f", "s", [*head, Message("assistant", " \n")])
    for style in ("blocks", "native"):
        samples, dropped = build(renderer, [empty, replace(empty, messages=head)], style=style)
        assert (samples, dropped) == ([], {})


def test_a_run_that_begins_with_the_model_has_a_sample_for_its_first_turn(renderer: ChatRenderer) -> None:
    run = Trajectory("t", "c", "r", "f", "s", [Message("assistant", "I begin."), Message("user", "x")])
    for style in ("blocks", "native"):
        (sample,), _ = build(renderer, [run], style=style)
        assert sample.completion == "I begin.<|im_end|>"


def deaf_renderer(make_tokenizer: Any) -> ChatRenderer:
    """With a template that shows neither reasoning nor calls."""
    deaf = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    deaf += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    return ChatRenderer(make_tokenizer(deaf, "<|im_end|>", "<|im_start|>", "<|endoftext|>"))


def test_a_template_that_loses_text_costs_the_samples_not_the_build(make_tokenizer: Any, make_run: Make) -> None:
    renderer = deaf_renderer(make_tokenizer)
    plain = Trajectory("t", "c", "r", "f", "s", [Message("user", "u"), Message("assistant", "a")])
    for style, lost in (("blocks", 4), ("native", 4)):
        samples, dropped = build(renderer, [make_run("c", "r", STEPS), plain], style=style)
        assert [sample.trajectory_id for sample in samples] == ["t"]
        assert dropped == {"chat template would lose text": lost}


def test_turns_before_one_that_the_template_loses_are_learnt_as_in_a_run_without_it(make_tokenizer: Any) -> None:
    renderer = deaf_renderer(make_tokenizer)
    turns = [Message("assistant", f"Turn {n}", reasoning="why" if n == 5 else None) for n in range(8)]
    messages = [m for n, turn in enumerate(turns) for m in (Message("user", f"Ask {n}"), turn)]
    whole = Trajectory("t", "c", "r", "f", "s", messages)
    ((native,), native_lost), (blocks, blocks_lost) = (build(renderer, [whole], style=s) for s in ("native", "blocks"))
    (shorter,), _ = build(renderer, [replace(whole, messages=messages[:10])], style="native")
    assert native.input_ids.tolist() == shorter.input_ids.tolist()
    assert native_lost == {"chat template would lose text": 3}  # the turn, and those that have it in their history
    assert [sample.turn for sample in blocks] == [1, 3, 5, 7, 9, 13, 15]  # a block shows what the template does not
    assert blocks_lost == {"chat template would lose text": 1}


def test_a_tokenizer_that_merges_across_blocks_still_gives_exact_lengths(
    chat_tokenizer: Any, make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = ChatRenderer(chat_tokenizer)
    real = renderer.tokens

    def merging(pieces: list[str]) -> list[list[int]]:
        # As if "...\n\n[TOOL" were one token: only a text that has both sides of a border shows it.
        joined = [piece.replace("\n\n[TOOL", "\x00") for piece in pieces]
        return real(joined)

    monkeypatch.setattr(renderer, "tokens", merging)
    run = make_run("c", "r", [(f"command{n}", 0) for n in range(6)], output="long " * 30)
    samples, dropped = build(renderer, [run], max_length=500)
    assert len(samples) + dropped.get("too long", 0) == 6
    for sample in samples:
        completion = [label for label in sample.labels if label != IGNORED]
        assert sample.input_ids.tolist() == merging([sample.prompt])[0] + completion
        assert len(sample.input_ids) <= 500


def test_an_action_read_out_of_the_text_stands_once_in_a_block(renderer: ChatRenderer) -> None:
    text = "I list.\n\n```bash\nls -la\n```"
    turn = Message("assistant", text, actions=[Action("bash", {"command": "ls -la"}, in_text=True)])
    run = Trajectory("t", "c", "r", "f", "s", [Message("user", "u"), turn, Message("user", "out"), turn])
    samples, _ = build(renderer, [run])
    assert samples[1].prompt.count("ls -la") == 1
    assert samples[1].completion == text + "<|im_end|>"
