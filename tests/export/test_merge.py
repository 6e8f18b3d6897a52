"""Export of a real tiny model: what comes out is the adapter's model, whole, and loads with plain transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from traceforge_core.config import load_config
from traceforge_core.errors import TraceForgeError
from traceforge_core.export import merge as export_module
from traceforge_core.export.merge import export, export_run
from traceforge_core.runs import Run

PROMPT = torch.tensor([[5, 300, 20, 41, 7, 90, 11]])


def logits_apart(tiny_model_dir: Path, adapter: Path) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model_dir / "weights"), adapter).eval()
    with torch.no_grad():
        return model(input_ids=PROMPT).logits


def test_the_exported_folder_is_the_adapters_model_for_plain_transformers(
    tiny_model_dir: Path, tiny_datasets_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    adapter, out = make_adapter(scale=0.3), tmp_path / "exported"
    figures = export(load_config(), tiny_model_dir, adapter, out, datasets=tiny_datasets_dir)
    assert (figures["verdict"], figures["dtype"]) == ("pass", "float32")
    assert figures["difference"] < 1e-4 < figures["adapter_effect"]
    assert figures["merged_layers"] == 2 * 7
    model = AutoModelForCausalLM.from_pretrained(out)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    with torch.no_grad():
        exported = model.eval()(input_ids=PROMPT).logits
    torch.testing.assert_close(exported, logits_apart(tiny_model_dir, adapter), rtol=0, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(out)
    original = AutoTokenizer.from_pretrained(tiny_model_dir / "tokenizer")
    talk = [{"role": "user", "content": "Fix it."}]
    assert tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False) == (
        original.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    )
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert "quantization_config" not in config
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert needed | {"README.md", export_module.MARK} <= {path.name for path in out.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["exported"]


def test_in_bf16_the_difference_is_judged_by_what_rounding_does(
    tiny_model_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    figures = export(load_config(), tiny_model_dir, make_adapter(scale=0.3), tmp_path / "out", dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16
    assert figures["verdict"] == "pass"
    assert 1e-4 < figures["difference"] <= export_module.ROUNDING_FACTOR * figures["rounding"]
    assert figures["adapter_effect"] > 10 * figures["rounding"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["scaling", "one layer not merged", "other adapter"])
def test_a_wrong_merge_is_caught_and_leaves_nothing(
    fault: str,
    dtype: Any,
    tiny_model_dir: Path,
    make_adapter: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from peft.tuners.lora import Linear, LoraModel

    right = LoraModel.merge_and_unload

    def wrong(self: Any, *args: Any, **options: Any) -> Any:
        layers = [part for part in self.modules() if isinstance(part, Linear)]
        for layer in layers if fault != "one layer not merged" else layers[3:4]:
            if fault == "scaling":
                layer.scaling["default"] *= 1.1
            else:
                layer.lora_B["default"].weight.data = torch.flip(layer.lora_B["default"].weight.data, [0])
                if fault == "one layer not merged":
                    layer.lora_B["default"].weight.data.zero_()
        return right(self, *args, **options)

    monkeypatch.setattr(LoraModel, "merge_and_unload", wrong)
    with pytest.raises(TraceForgeError, match="does not give the adapter's logits"):
        export(load_config(), tiny_model_dir, make_adapter(scale=0.3), tmp_path / "out", dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_that_bf16_swallows_is_exported_with_a_warning(
    tiny_model_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    figures = export(load_config(), tiny_model_dir, make_adapter(scale=1e-5), tmp_path / "out", dtype="bfloat16")
    assert figures["verdict"] == "lost in rounding"
    assert "export with dtype float32" in caplog.text


def test_a_folder_that_is_no_export_is_left_alone_and_an_earlier_export_is_replaced(
    tiny_model_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    precious = tmp_path / "thesis"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years of work", encoding="utf-8")
    with pytest.raises(TraceForgeError, match="left alone"):
        export(load_config(), tiny_model_dir, make_adapter(), precious)
    assert (precious / "thesis.tex").read_text() == "years of work"
    out = tmp_path / "out"
    for seed in (1, 2):
        export(load_config(), tiny_model_dir, make_adapter(seed, scale=0.3), out)
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        exported = AutoModelForCausalLM.from_pretrained(out).eval()(input_ids=PROMPT).logits
    torch.testing.assert_close(exported, logits_apart(tiny_model_dir, make_adapter(2, scale=0.3)), rtol=0, atol=1e-4)


def test_an_adapter_of_another_model_and_a_full_disk_are_told_plainly(
    tiny_model_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import PreTrainedModel

    other = tmp_path / "other"
    shutil.copytree(make_adapter(), other)
    weights = load_file(other / "adapter_model.safetensors")
    save_file({name: tensor.repeat(1, 2) for name, tensor in weights.items()}, other / "adapter_model.safetensors")
    with pytest.raises(TraceForgeError, match="cannot be put on the model"):
        export(load_config(), tiny_model_dir, other, tmp_path / "out")

    def full(*_args: Any, **_options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(TraceForgeError, match="The disk is full"):
        export(load_config(), tiny_model_dir, make_adapter(), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"other"}


def test_too_little_space_for_the_weights_is_said_before_any_is_written(
    tiny_model_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr("traceforge_core.runs.disk.shutil.disk_usage", lambda folder: little)
    with pytest.raises(TraceForgeError, match=r"the exported model needs about 806.0 KiB.*name another --out"):
        export(load_config(), tiny_model_dir, make_adapter(), tmp_path / "exported")
    assert list(tmp_path.iterdir()) == []


def test_a_run_exports_its_last_training_with_a_card_that_the_hub_accepts(trained_run: Run, tmp_path: Path) -> None:
    figures = export_run(trained_run, tmp_path / "out")
    assert figures["stage"] == "branch_parallel"
    assert figures["bytes"] > 500_000
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert "simpo" in card.data.tags
    assert "base_model" not in card.data.to_dict()  # `tiny` is no repository on the hub
    assert "| preference pairs | 31 |" in card.text
    assert "outcome 20, recovery 11" in card.text
    assert "**pass** (max loss difference 2.5e-08, steps 8)" in card.text
    assert "in float32: **pass**" in card.text
    assert "torch 2." in card.text
    assert "secret" not in card.text and str(tmp_path) not in card.text


def test_the_stage_can_be_named_and_one_that_is_not_there_lists_those_that_are(
    trained_run: Run, tmp_path: Path
) -> None:
    assert export_run(trained_run, tmp_path / "out", stage="sft")["stage"] == "sft"
    assert (
        "Agreement with TRL's CPOTrainer concerns preference training" in (tmp_path / "out" / "README.md").read_text()
    )
    with pytest.raises(TraceForgeError, match=r"no adapter of stage oracle \(those there: sft, branch_parallel\)"):
        export_run(trained_run, tmp_path / "out", stage="oracle")


def test_an_adapter_card_names_its_base_on_the_hub(
    tiny_datasets_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    from traceforge_core.export.model_card import write_adapter_card

    model = {"name": "Qwen/Qwen3-8B", "weights": "Qwen/Qwen3-8B"}
    (tmp_path / "model.json").write_text(json.dumps(model), encoding="utf-8")
    adapter = make_adapter()
    inputs = {"model": tmp_path, "datasets": tiny_datasets_dir, "sft": tmp_path}
    write_adapter_card(adapter, "shared_prefix", load_config(), inputs, {"steps": 3, "last_loss": 0.25})
    card = ModelCard.load(adapter / "README.md")
    assert card.data.base_model == "Qwen/Qwen3-8B"
    assert card.data.base_model_relation == "adapter"
    assert card.data.library_name == "peft"
    assert "went on from an SFT adapter" in card.text and "not compared when" in card.text
    front = yaml.safe_load((adapter / "README.md").read_text().split("---")[1])
    assert front["base_model"] == "Qwen/Qwen3-8B"
    from peft import PeftConfig

    assert PeftConfig.from_pretrained(adapter).peft_type == "LORA"
