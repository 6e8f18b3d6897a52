"""The next action of base and tuned model, side by side with the recorded one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from traceforge_core.config import load_config
from traceforge_core.errors import TraceForgeError
from traceforge_core.evaluation.predict import predict, render, split_sample
from traceforge_core.modeling.chat import load_renderer
from traceforge_core.trajectories.model import Message


@pytest.mark.slow
def test_base_and_tuned_model_write_beside_the_recorded_action(
    tiny_model_dir: Path, tiny_datasets_dir: Path, make_adapter: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    adapters = {"zero": make_adapter(scale=0.0), "tuned": make_adapter(5, scale=0.5)}
    answers = predict(load_config(), tiny_model_dir, tiny_datasets_dir, adapters, sample=2, new_tokens=12)
    assert [answer["sample_id"] for answer in answers] == ["run-0#2", "run-4#2"]
    for answer in answers:
        assert list(answer["actions"]) == ["base", "zero", "tuned"]
        assert answer["actions"]["zero"] == answer["actions"]["base"] != answer["actions"]["tuned"]
    assert "loop stops one short" in answers[0]["history"]
    assert answers[0]["recorded"].startswith("def total(values):")
    text = render(answers)
    assert text.count("tokens of history, nothing of it cut)") == 2
    shortened = render([answers[0] | {"trimmed_messages": 3}])
    assert "tokens of history, 3 messages cut from its middle to fit)" in shortened
    assert text.count("  recorded:") == 2 and "  tuned:" in text and "case-0, turn 2" in text


def test_the_model_takes_over_at_the_last_turn_of_a_whole_trajectory(tiny_model_dir: Path) -> None:
    renderer = load_renderer(tiny_model_dir)
    messages = [
        Message("user", "One"),
        Message("assistant", "First"),
        Message("user", "Two"),
        Message("assistant", "Last"),
    ]
    encoded = renderer.encode(messages)
    labels = [token if mark else -100 for token, mark in zip(encoded.input_ids, encoded.assistant_mask, strict=True)]
    row = {"input_ids": encoded.input_ids, "labels": labels, "prompt": "unused"}
    ids, history, recorded = split_sample(row, renderer.tokenizer, renderer.end_of_turn)
    assert recorded == "Last"
    assert "First" in history and history.endswith("<|im_start|>assistant\n")
    assert list(encoded.input_ids[: len(ids)]) == list(ids)


def test_with_loss_on_everything_the_model_takes_over_behind_the_prompt(tiny_model_dir: Path) -> None:
    renderer = load_renderer(tiny_model_dir)
    done = renderer.encode_completion([Message("user", "One")], [Message("assistant", "First")])
    ids = [*done.prompt_ids, *done.completion_ids]
    row = {"input_ids": ids, "labels": ids, "prompt": done.prompt_text}
    assert split_sample(row, renderer.tokenizer, renderer.end_of_turn)[::2] == ([*done.prompt_ids], "First")


def test_no_held_out_history_is_said_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(TraceForgeError, match=r"datasets\.split\.held_out"):
        predict(load_config(), tmp_path, tmp_path, {})
