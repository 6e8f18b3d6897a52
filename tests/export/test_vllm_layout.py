"""What vLLM's loader expects of the folders that come out, and that the check notices what it does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceforge_core.config import load_config
from traceforge_core.export import merge as export_module
from traceforge_core.export.merge import export
from traceforge_core.export.vllm_layout import adapter_problems, model_problems


@pytest.fixture(scope="module")
def exported(tiny_model_dir: Path, make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In several shards, as a large model is."""
    out = tmp_path_factory.mktemp("exported") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_module, "SHARD_SIZE", "500KB")
        export(load_config(), tiny_model_dir, make_adapter(scale=0.3), out)
    return out


def spoilt(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


def test_a_model_in_shards_has_an_index_and_no_problem(exported: Path) -> None:
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert "model.layers.0.self_attn.q_proj.weight" in index["weight_map"]
    assert model_problems(exported) == []


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: change(folder / "config.json", architectures=None), "names no architectures"),
        (lambda folder: change(folder / "config.json", quantization_config={"a": 1}), "has a quantization_config"),
        (lambda folder: next(folder.glob("model-00002-*")).unlink(), "model-00002-of-"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "no chat template"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: change(folder / "generation_config.json", eos_token_id=None), "which token ends a turn"),
    ],
)
def test_what_cannot_be_served_is_named(
    spoil: Callable[[Path], None], told: str, exported: Path, tmp_path: Path
) -> None:
    folder = spoilt(exported, tmp_path)
    spoil(folder)
    assert told in "; ".join(model_problems(folder))


def test_an_adapter_is_served_as_it_is_and_an_odd_one_is_not(make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    adapter = make_adapter()
    assert adapter_problems(adapter) == []
    folder = spoilt(adapter, tmp_path)
    change(
        folder / "adapter_config.json", use_dora=True, modules_to_save=["lm_head"], r=1024, target_modules=["q_proj"]
    )
    problems = adapter_problems(folder)
    assert {"use_dora is True", "modules_to_save is ['lm_head']"} <= set(problems)
    assert "the rank is 1024; at most 512 can be served" in problems
    assert "does not belong to a layer that target_modules names" in problems[-1]
    (folder / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors cannot be read" in "; ".join(adapter_problems(folder))


def test_a_base_that_is_quantised_itself_is_unpacked_and_the_card_says_so(
    tiny_model_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    packed = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(packed / "weights", quantization_config=nf4).save_pretrained(packed / "nf4")
    shutil.rmtree(packed / "weights")
    (packed / "nf4").rename(packed / "weights")
    assert "quantization_config" in json.loads((packed / "weights" / "config.json").read_text())
    figures = export(load_config(), packed, make_adapter(scale=0.3), tmp_path / "out")
    assert (figures["verdict"], figures["base"]) == ("pass", "unpacked")
    assert model_problems(tmp_path / "out") == []
    assert "It was unpacked to float32 before the merge" in (tmp_path / "out" / "README.md").read_text()


def test_the_card_of_a_qlora_model_says_what_it_was_merged_into(
    tiny_model_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    config = load_config(assignments=["model.quantization=nf4"])
    export(config, tiny_model_dir, make_adapter(scale=0.3), tmp_path / "out")
    assert "trained on the base in NF4. Here it is merged into" in (tmp_path / "out" / "README.md").read_text()
