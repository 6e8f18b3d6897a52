"""A tiny model and random token data in the layout that the earlier stages leave behind, made once a session."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from traceforge_core.config import RunConfig, load_config

VOCABULARY = 97


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers compute with one thread each: reproducible, and the machine is shared."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the model stage leaves behind, with a Qwen3 of two layers and 97 tokens."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    Qwen3ForCausalLM(qwen3_config()).save_pretrained(folder / "weights")
    words = {f"w{index}": index for index in range(VOCABULARY - 2)} | {"<pad>": VOCABULARY - 2, "<eos>": VOCABULARY - 1}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "model.json").write_text(json.dumps({"name": "tiny", "weights": "weights", "revision": None}))
    return folder


def qwen3_config() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY - 2,
        eos_token_id=VOCABULARY - 1,
        bos_token_id=None,
    )


def random_pairs(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs of unequal lengths, some with an observation masked in the middle of a completion."""
    draw = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        row: dict[str, Any] = {"pair_id": f"pair-{index}", "prompt_ids": _tokens(draw, draw.integers(3, 40))}
        for branch in ("chosen", "rejected"):
            ids = _tokens(draw, draw.integers(1, 25))
            mask = [1] * len(ids)
            if len(ids) > 6 and draw.random() < 0.5:
                mask[2:5] = [0, 0, 0]
            row |= {f"{branch}_ids": ids, f"{branch}_mask": mask}
        rows.append(row)
    return rows


def _tokens(draw: np.random.Generator, count: int) -> list[int]:
    return draw.integers(0, VOCABULARY - 2, int(count)).tolist()


def write_pairs(path: Path, rows: list[dict[str, Any]]) -> None:
    ids, mask = pa.list_(pa.int32()), pa.list_(pa.int8())
    schema = pa.schema(
        [("pair_id", pa.string())]
        + [(name, ids) for name in ("prompt_ids", "chosen_ids", "rejected_ids")]
        + [(name, mask) for name in ("chosen_mask", "rejected_mask")]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def write_samples(path: Path, count: int, seed: int = 0) -> None:
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        ids = _tokens(draw, draw.integers(8, 40))
        rows.append({"input_ids": ids, "labels": [-100] * 4 + ids[4:]})
    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32()))])
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


@pytest.fixture(scope="session")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    for name, count, seed in (("train", 14, 1), ("held_out", 4, 2)):
        write_pairs(folder / "preference" / f"{name}.parquet", random_pairs(count, seed))
        write_samples(folder / "sft" / f"{name}.parquet", count, seed)
    return folder


@pytest.fixture
def make_datasets(tmp_path: Path) -> Callable[[int], Path]:
    """A datasets folder with so many training pairs."""

    def make(count: int) -> Path:
        write_pairs(tmp_path / "datasets" / "preference" / "train.parquet", random_pairs(count, count))
        return tmp_path / "datasets"

    return make


@pytest.fixture(scope="session")
def sft_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter as SFT might leave it. From a fresh one (B = 0) Adam's first step is lr × sign(gradient), and an entry
    whose gradient is rounding noise then differs by a whole step between two right computations."""
    import torch

    from traceforge_core.config import ModelConfig
    from traceforge_core.modeling.adapters import save_adapter
    from traceforge_core.modeling.loading import load_model

    folder = tmp_path_factory.mktemp("sft")
    options = {"device": "cpu", "backend": "transformers", "max_length": 64, "gradient_checkpointing": False}
    model, _ = load_model(model_dir, ModelConfig(), adapter=None, seed=0, **options)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(std=0.05)
    save_adapter(model, folder / "adapter")
    return folder


@pytest.fixture
def inputs(model_dir: Path, datasets_dir: Path, sft_dir: Path) -> dict[str, Path]:
    return {"model": model_dir, "datasets": datasets_dir, "sft": sft_dir}


@pytest.fixture
def configure() -> Callable[..., RunConfig]:
    """A small configuration; keyword arguments are `section__field=value`."""

    def build(**changes: Any) -> RunConfig:
        fixed = [
            "model.device=cpu",
            "sft.max_steps=6",
            "sft.checkpoint_steps=2",
            "sft.learning_rate=0.01",
            "preference.max_steps=6",
            "preference.gradient_accumulation=2",
            "preference.learning_rate=0.001",
            "preference.checkpoint_steps=2",
        ]
        return load_config(
            assignments=fixed + [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in changes.items()]
        )

    return build
