"""Loading a model to train: the same weights every time, the adapter in float32, and clear words where it cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from traceforge_core.config import ModelConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.adapters import hash_adapter, read_adapter, relative_difference, save_adapter
from traceforge_core.modeling.loading import _rope, fill_adapter, load_model, prefer_cublaslt, weights_of


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("model dir")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / "weights")
    inner = Tokenizer(models.WordLevel({f"w{index}": index for index in range(20)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w1").save_pretrained(folder / "tokenizer")
    (folder / "model.json").write_text(json.dumps({"weights": "weights", "revision": None}))
    return folder


def load(model_dir: Path, *, adapter: Path | None = None, seed: int = 0, **config: Any) -> Any:
    model, tokenizer = load_model(
        model_dir,
        ModelConfig(**config),
        device="cpu",
        backend="transformers",
        max_length=32,
        adapter=adapter,
        seed=seed,
        gradient_checkpointing=False,
    )
    assert len(tokenizer) == len(AutoTokenizer.from_pretrained(model_dir / "tokenizer"))
    return model


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_adapter_is_float32_on_all_seven_projections_whatever_the_base_is(model_dir: Path, dtype: str) -> None:
    model = load(model_dir, dtype=dtype)
    assert len(trained(model)) == 14
    assert {parameter.dtype for parameter in trained(model).values()} == {torch.float32}
    assert model.get_base_model().lm_head.weight.dtype == getattr(torch, dtype)
    modules = model.modules()
    assert not any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in modules)


def test_a_fresh_adapter_depends_on_the_seed_alone_and_changes_nothing_yet(model_dir: Path) -> None:
    torch.manual_seed(1)
    first = trained(load(model_dir))
    torch.manual_seed(2)
    again, other = trained(load(model_dir, dtype="bfloat16")), trained(load(model_dir, seed=1))
    for name, parameter in first.items():
        assert torch.equal(parameter, again[name])
        assert torch.equal(parameter, other[name]) == (".lora_B." in name)
        assert bool(parameter.any()) == (".lora_A." in name)


def test_a_saved_adapter_is_gone_on_from_bit_for_bit(model_dir: Path, tmp_path: Path) -> None:
    model = load(model_dir)
    for parameter in trained(model).values():
        parameter.data.normal_()
    save_adapter(model, tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    continued = trained(load(model_dir, adapter=tmp_path / "adapter", seed=5))
    for name, parameter in trained(model).items():
        assert torch.equal(parameter, continued[name])

    filled = load(model_dir, seed=7)  # the way the Unsloth backend takes an adapter
    fill_adapter(filled, tmp_path / "adapter")
    for name, parameter in trained(model).items():
        assert torch.equal(parameter, trained(filled)[name])

    save_adapter(load(model_dir, adapter=tmp_path / "adapter"), tmp_path / "again")
    assert hash_adapter(tmp_path / "again") == hash_adapter(tmp_path / "adapter")


def test_an_adapter_that_does_not_fit_is_refused(model_dir: Path, tmp_path: Path) -> None:
    save_adapter(load(model_dir, lora={"targets": ["q_proj"]}), tmp_path / "small")
    with pytest.raises(TraceForgeError, match=r"does not fit this model"):
        fill_adapter(load(model_dir), tmp_path / "small")
    with pytest.raises(TraceForgeError, match=r"There is no adapter in"):
        read_adapter(tmp_path / "nowhere")


def test_relative_difference_is_that_of_the_l2_norm_and_names_the_worst_tensor() -> None:
    base = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([12.0])}
    moved = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([12.0])}
    assert relative_difference(moved, base) == pytest.approx((0.5 / 13, "a", 0.1))
    zero = {"a": torch.zeros(2), "b": torch.zeros(1)}
    assert relative_difference(zero, zero)[0] == 0.0
    assert relative_difference(base, zero)[0] == float("inf")


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        ({"rope_type": "default", "rope_theta": 10000.0, "attention_scaling": 1.0}, True),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}, False),
        ({"rope_type": "default", "rope_theta": 500000.0}, False),
    ],
)
def test_a_scaled_rotary_embedding_is_noticed(changed: dict[str, Any], same: bool) -> None:
    own = Qwen3Config(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    other = Qwen3Config(rope_parameters=changed)
    assert (_rope(other) == _rope(own)) == same


def test_weights_lie_in_the_stage_or_where_it_says(model_dir: Path, tmp_path: Path) -> None:
    assert weights_of(model_dir) == (str(model_dir / "weights"), None)
    (tmp_path / "model.json").write_text(json.dumps({"weights": "Qwen/Qwen3-8B", "revision": "abc"}))
    assert weights_of(tmp_path) == ("Qwen/Qwen3-8B", "abc")
    with pytest.raises(TraceForgeError, match=r"not the output of the model stage"):
        weights_of(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("wanted", "capability", "preferred"),
    [("auto", (8, 6), True), ("auto", (9, 0), False), ("on", (9, 0), True), ("off", (8, 6), False)],
)
def test_cublaslt_is_preferred_on_ampere_or_when_asked_for(
    wanted: str, capability: tuple[int, int], preferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", calls.append)
    prefer_cublaslt(wanted, "cuda")
    assert calls == (["cublaslt"] if preferred else [])
    prefer_cublaslt("on", "cpu")
    assert len(calls) <= 1
