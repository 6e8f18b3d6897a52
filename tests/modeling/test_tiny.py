"""The embedded model is an ordinary Hugging Face folder, the same each time, with a tokenizer that loses nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling import tiny

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny.build_tiny(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def conversations() -> list[list[dict[str, Any]]]:
    """The shipped trajectories as chat messages, arguments as JSON text as they are at rest."""
    kept = ("role", "content", "reasoning_content", "tool_calls")
    files = sorted(tiny.SAMPLES.rglob("*.traj.json"))
    found = []
    for file in files:
        messages = json.loads(file.read_text(encoding="utf-8"))["messages"]
        found.append([{k: m[k] for k in kept if k in m} for m in messages if m["role"] != "exit"])
    return found


def digests(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}


@pytest.mark.slow
def test_the_same_bytes_come_out_in_another_process_with_other_threads(folder: Path, tmp_path: Path) -> None:
    script = "import sys; from pathlib import Path; from traceforge_core.modeling import tiny as t; "
    script += "t.build_tiny(Path(sys.argv[1]))"
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "RAYON_NUM_THREADS": "3", "PYTHONHASHSEED": "77"}
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "again")],
        check=True,
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
    )
    assert digests(tmp_path / "again") == digests(folder)
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= digests(folder).keys()


def test_building_it_leaves_the_random_state_alone(tokenizer: Any) -> None:
    import torch

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    tiny.tiny_model(tokenizer)
    assert torch.equal(torch.rand(3), expected)


def test_it_loads_like_any_model_and_has_qwen3s_parts(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.dtype == torch.float32
    assert config.num_key_value_heads < config.num_attention_heads
    assert model.model.layers[0].self_attn.q_norm.weight.shape == (config.head_dim,)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert config.max_position_embeddings >= 131072
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    with torch.no_grad():
        loss = model(torch.arange(64)[None], labels=torch.arange(64)[None]).loss
    assert 6 < loss.item() < 12  # near chance, ln(2048) = 7.6


def test_the_tokenizer_gives_back_every_shipped_text(tokenizer: Any) -> None:
    texts = [message["content"] for messages in conversations() for message in messages]
    texts += ["", "\ttabs\r\nand no final newline", "Grüße, 日本語 📜 \u200b", "<think> is one token, <thinks> is not"]
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_markup_is_one_token_each_and_turns_end_with_im_end(tokenizer: Any) -> None:
    for token in tiny.CONTROL_TOKENS + tiny.MARKUP_TOKENS:
        assert len(tokenizer(token)["input_ids"]) == 1, token
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    text = tokenizer.decode(tokenizer("<|im_start|>a<think>b<|im_end|>")["input_ids"], skip_special_tokens=True)
    assert text == "a<think>b"


def test_shipped_trajectories_have_a_length_that_trains_quickly(tokenizer: Any) -> None:
    lengths = sorted(len(tokenizer.apply_chat_template(m, return_dict=True)["input_ids"]) for m in conversations())
    assert lengths[0] > 400 and lengths[-1] < 4096
    assert 1000 < lengths[len(lengths) // 2] < 3000


def test_the_mask_covers_exactly_what_the_model_produces(tokenizer: Any) -> None:
    for messages in conversations():
        encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        produced: list[list[int]] = []
        previous = 0
        for token, mark in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
            if mark and not previous:
                produced.append([])
            if mark:
                produced[-1].append(token)
            previous = mark
        turns = [message for message in messages if message["role"] == "assistant"]
        assert len(produced) == len(turns)
        for tokens, turn in zip(produced, turns, strict=True):
            text = tokenizer.decode(tokens)
            assert text.endswith("</tool_call><|im_end|>") and text.count("<|im_end|>") == 1
            assert turn["content"] in text and "<tool_response>" not in text
            assert text.startswith("<think>" if "reasoning_content" in turn else turn["content"][:10])
            for call in turn["tool_calls"]:
                assert text.count(call["function"]["arguments"]) == 1


def test_missing_samples_are_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "SAMPLES", tmp_path)
    with pytest.raises(TraceForgeError, match=r"sample trajectories are missing .* model\.name"):
        tiny.build_tiny(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_an_adapter_on_it_learns(folder: Path, tokenizer: Any) -> None:
    """Twelve steps on one trajectory, only LoRA weights, as the demo does: the loss falls clearly below chance."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder)
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    ids = torch.tensor([tokenizer.apply_chat_template(conversations()[0], return_dict=True)["input_ids"]])
    losses = []
    for _ in range(12):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.5 and losses[-1] < 7
