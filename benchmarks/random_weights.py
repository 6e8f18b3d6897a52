"""Models of random weights and pairs of random tokens, in the folders that the stages before training leave: what the
benchmarks of strategies train on, without downloading anything.

    folder = built_model("qwen3-8b", work / "qwen3-8b", "cuda")    # built once; later calls find it
    write_random_pairs(work / "pairs", SHAPES["qwen3-8b"], tokens=8192, count=6)
    config = configuration("qwen3-8b", "cuda", tokens=8192, steps=4)
    job = stages.preference_job(kind, config, {"model": folder, "datasets": work / "pairs", "sft": folder}, out)

`python benchmarks/random_weights.py NAME FOLDER --device cuda` builds a model in a process of its own, so that its GPU
memory is free again afterwards.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from traceforge_core.config import ModelConfig, RunConfig, load_config  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "small": {
        "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2,
    },
    "tiny": {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
BIG = "qwen3-8b"  # in bfloat16, on a GPU in NF4; the others are float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    options = parser.parse_args()
    build_model(options.name, options.folder, options.device)


def built_model(name: str, folder: Path, device: str) -> Path:
    """What the stages model and sft would leave, of that shape: `folder`, built unless it is there."""
    if not (folder / "model.json").exists():
        print(f"building {name} with random weights", flush=True)
        subprocess.run([sys.executable, __file__, name, str(folder), "--device", device], check=True)
    return folder


def configuration(name: str, device: str, tokens: int, steps: int, **changes: Any) -> RunConfig:
    """Training of that model on branches of `tokens` tokens: a pair a step and worker, and nothing is decayed, saved or
    checked on the way, so that every step takes the same work. `changes` are `section__field=value`."""
    big = name == BIG
    values = {
        "model__device": device,
        "model__dtype": "bfloat16" if big else "float32",
        "model__quantization": "nf4" if big and device == "cuda" else "none",
        "model__backend": "transformers",
        "datasets__preference__max_length": tokens,
        "preference__max_steps": steps,
        "preference__gradient_accumulation": 1,
        "preference__schedule": "constant",
        "preference__learning_rate": 1e-5,
        "preference__checkpoint_steps": 1000,
        "preference__gradient_checkpointing": big or tokens > 4096,
        "comparison__gradient_steps": 0,
    }
    values |= changes
    return load_config(assignments=[f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in values.items()])


def write_random_pairs(folder: Path, shape: dict[str, Any], tokens: int, count: int) -> Path:
    """A datasets stage of `count` pairs of random tokens, unless it is there: 95% of `tokens` are the prompt, and both
    completions fill the rest. Returns `folder`."""
    import numpy as np

    if (folder / "preference" / "train.parquet").exists():
        return folder
    draw = np.random.default_rng(tokens)
    completion = max(1, tokens // 20)
    rows = []
    for index in range(count):
        parts = {"prompt": tokens - completion, "chosen": completion, "rejected": completion}
        row: dict[str, Any] = {"pair_id": f"random-{index}"}
        row |= {f"{part}_ids": draw.integers(10, shape["vocab_size"] - 10, n).tolist() for part, n in parts.items()}
        row |= {f"{branch}_mask": [1] * completion for branch in ("chosen", "rejected")}
        rows.append(row)
    write_pairs(folder, rows)
    return folder


def write_pairs(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Leave the rows where a datasets stage leaves the pairs to train on."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "preference" / "train.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def build_model(name: str, folder: Path, device: str) -> None:
    """Random weights of a shape (Qwen3-8B: NF4 with double quantisation on a GPU), a tokenizer that is never used, and
    an adapter whose B is not zero, so that every gradient has a size."""
    import torch
    from peft import get_peft_model
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast, Qwen3Config

    from traceforge_core.modeling.adapters import save_adapter
    from traceforge_core.modeling.loading import draw_adapter, lora_config

    shutil.rmtree(folder, ignore_errors=True)
    big = name == BIG
    size = SHAPES[name]
    config = Qwen3Config(
        **size,
        head_dim=size["hidden_size"] // size["num_attention_heads"],
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if big else torch.float32)
    if big and device == "cuda":
        model.save_pretrained(folder / "bf16", max_shard_size="4GB")
        del model
        torch.cuda.empty_cache()
        nf4 = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        model = AutoModelForCausalLM.from_pretrained(
            folder / "bf16", dtype=torch.bfloat16, quantization_config=nf4, device_map={"": 0}
        )
        shutil.rmtree(folder / "bf16")
    model.save_pretrained(folder / "weights")
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "w": 2}, unk_token="w"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    for place in ("tokenizer", "weights"):  # Unsloth looks beside the weights
        tokenizer.save_pretrained(folder / place)
    adapted = get_peft_model(model, lora_config(ModelConfig()))
    draw_adapter(adapted, 0)
    for parameter_name, parameter in sorted(adapted.named_parameters()):
        if ".lora_B." in parameter_name:
            parameter.data.normal_(0, 0.01)
    save_adapter(adapted, folder / "adapter")
    (folder / "model.json").write_text(json.dumps({"name": name, "weights": "weights", "revision": None}))


if __name__ == "__main__":
    main()
