"""The embedded default model: a small Qwen3 and its tokenizer, built on the spot, no download.

    build_tiny(Path("somewhere"))     # then load "somewhere" like any other Hugging Face folder

The architecture is Qwen3's own (grouped-query attention, q/k norms, untied head), so whatever runs on it runs on the
larger ones. The tokenizer is a byte-level BPE with Qwen's pre-tokenisation and special tokens, trained on the shipped
samples. The same library versions give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traceforge_core.errors import TraceForgeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

SAMPLES = Path(__file__).parents[1] / "samples" / "data"
CHATML = Path(__file__).parent / "templates" / "chatml.jinja"

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
VOCABULARY = 2048
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LONGEST = 131072
SEED = 20250101
HEAD_STD = 0.15
"""Standard deviation of the head. The final norm fixes the length of a hidden state at sqrt(hidden_size) = 8, so with
the usual 0.02 no logit could pass about 1 and an adapter, which leaves the head alone, could never be sure of anything.
"""


def build_tiny(folder: Path) -> None:
    """Write config, weights, generation config and tokenizer into `folder`, in the ordinary Hugging Face layout."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # one file of a megabyte
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer: `<|endoftext|>` pads, `<|im_end|>` ends a turn, the chat template is TraceForge's ChatML.

    Raises TraceForgeError where the samples it is trained on are not installed.
    """
    from tokenizers import Tokenizer, trainers
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import AddedToken, Qwen2Tokenizer

    frame = Qwen2Tokenizer().backend_tokenizer
    learner = Tokenizer(BPE())
    learner.normalizer, learner.pre_tokenizer = frame.normalizer, frame.pre_tokenizer
    special = CONTROL_TOKENS + MARKUP_TOKENS
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(special),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator(_sample_texts(), trainer)
    learned = json.loads(learner.to_str())["model"]
    merges: Any = [tuple(merge) for merge in learned["merges"]]  # annotated as text upstream; the backend takes pairs

    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=LONGEST,
    )
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    tokenizer.chat_template = CHATML.read_text(encoding="utf-8")
    return tokenizer


def tiny_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """The untrained model for that tokenizer, float32 on the CPU: 2 layers, hidden size 64, 4 query and 2 key heads."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        **SHAPE,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Qwen3ForCausalLM(config)
        torch.nn.init.normal_(model.lm_head.weight, std=HEAD_STD)
    model.eval()
    return model


def _sample_texts() -> Iterator[str]:
    """Every text of the shipped trajectories that a model reads or writes, in a fixed order."""
    files = sorted(SAMPLES.rglob("*.traj.json"))
    if not files:
        raise TraceForgeError(
            f"The sample trajectories are missing ({SAMPLES}), and the tiny model's tokenizer is trained on them. "
            "Install TraceForge again, or name another model with model.name."
        )
    for file in files:
        messages: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["messages"]
        for message in messages:
            yield message.get("content") or ""
            yield message.get("reasoning_content") or ""
            for call in message.get("tool_calls") or []:
                yield call["function"]["arguments"]
    yield CHATML.read_text(encoding="utf-8")
