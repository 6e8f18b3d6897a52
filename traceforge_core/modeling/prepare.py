"""The `model` stage: find the model a run trains, settle its tokenizer and chat template, and write both down.

    model.json      what to load, and what it is
    tokenizer/      the tokenizer with the chat template of this run
    weights/        only for the embedded model; any other stays where it is

`model.name` is `tiny`, a folder, or a hub id. Weights are neither downloaded here nor read beyond their files' headers:
what can be wrong with a model (not there, an adapter, half a download, a tokenizer that does not fit) is said before
anything heavy starts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceforge_core.config import ModelConfig, RunConfig
from traceforge_core.errors import TraceForgeError, page
from traceforge_core.modeling.source import Source, find_model, read_config
from traceforge_core.runs import write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

PAD_CANDIDATES = ("<|endoftext|>", "<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<unk>")


def prepare_model(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> dict[str, Any]:
    """Write model.json and tokenizer/ (and weights/ for `tiny`); the figures name architecture, sizes and template.

    Raises TraceForgeError where the model cannot be used, saying why and what to do.
    """
    model = config.model
    source = _find(model, out_dir)
    tokenizer = _load_tokenizer(source, model)
    _settle_padding(tokenizer, model.name)
    _check_vocabulary(tokenizer, source, model.name)

    from traceforge_core.modeling.targets import check_targets
    from traceforge_core.modeling.template_choice import choose_chat_template

    check_targets(
        source.load_from,
        model.lora.targets,
        revision=source.revision,
        offline=source.offline,
        trust_remote_code=model.trust_remote_code,
    )
    template = choose_chat_template(tokenizer, model.chat_template)
    tokenizer.save_pretrained(out_dir / "tokenizer")

    text_config = source.config.get("text_config") or source.config
    description = {
        "name": model.name,
        "weights": source.weights,
        "revision": source.revision,
        "architecture": (source.config.get("architectures") or [None])[0],
        "model_type": source.config.get("model_type"),
        "chat_template": template,
        "vocabulary": len(tokenizer),
        "layers": text_config.get("num_hidden_layers"),
        "hidden_size": text_config.get("hidden_size"),
        "longest": text_config.get("max_position_embeddings"),
        "quantized": (source.config.get("quantization_config") or {}).get("quant_method"),
    }
    if model.trust_remote_code:
        log.warning("Python code that comes with %s is run (model.trust_remote_code).", model.name)
        description["trust_remote_code"] = True
    write_json(out_dir / "model.json", description)
    return {name: value for name, value in description.items() if name != "weights"}


def _find(model: ModelConfig, out_dir: Path) -> Source:
    if model.name == "tiny":
        from traceforge_core.modeling.tiny import build_tiny

        build_tiny(out_dir / "weights")
        return Source(str(out_dir / "weights"), "weights", read_config(out_dir / "weights" / "config.json"))
    return find_model(model)


def _load_tokenizer(source: Source, model: ModelConfig) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.load_from,
            revision=source.revision,
            local_files_only=source.offline,
            trust_remote_code=model.trust_remote_code,
        )
    except Exception as error:  # transformers raises OSError, ValueError, ImportError, KeyError, ... as it finds fit
        reason = str(error).strip().split("\n")[0].rstrip(".")
        hint = (
            "Set model.trust_remote_code=true if you trust its code."
            if "trust_remote_code" in str(error)
            else "The tokenizer's files (tokenizer.json, tokenizer_config.json) must lie beside config.json."
        )
        raise TraceForgeError(f"Cannot load the tokenizer of {model.name}: {reason}. {hint}") from error
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):  # made of nothing but the model type's special tokens
        raise TraceForgeError(
            f"There are no tokenizer files at {model.name}. The tokenizer's files (tokenizer.json, "
            "tokenizer_config.json) must lie beside config.json: copy them from the model's original."
        )
    return tokenizer


def _settle_padding(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Make sure that turns can be ended and batches padded."""
    if tokenizer.eos_token is None:
        raise TraceForgeError(
            f"The tokenizer of {name} names no end-of-sequence token, so a turn could not be ended. Set eos_token in "
            f"its tokenizer_config.json. {page('tokenizer-tokens')}"
        )
    if tokenizer.pad_token is None:
        known = tokenizer.get_vocab()
        tokenizer.pad_token = next((token for token in PAD_CANDIDATES if token in known), tokenizer.eos_token)
        log.info(
            "The tokenizer of %s has no padding token; using %s. %s",
            name,
            tokenizer.pad_token,
            page("tokenizer-tokens"),
        )


def _check_vocabulary(tokenizer: PreTrainedTokenizerBase, source: Source, name: str) -> None:
    rows = (source.config.get("text_config") or source.config).get("vocab_size")
    if rows is not None and len(tokenizer) > rows:
        raise TraceForgeError(
            f"The tokenizer of {name} has {len(tokenizer)} tokens, its model only {rows}: they do not belong together. "
            "Put the model's own tokenizer beside its config.json."
        )
