"""Token ids as readable stretches: which text is learned, token by token, and which is only read.

stretches(tokenizer, ids, learned)    # [{"read": "..."}, {"learned": ["<think>", "\n", "Why", ...]}, ...]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Stretch = dict[str, Any]
LONGEST_READ = 60_000
"""Characters of one stretch that are shown; of a longer one the middle is left out, and said to be."""


def stretches(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], learned: Sequence[bool]) -> list[Stretch]:
    """Runs of tokens with equal `learned`. A learned run is a list of texts, one a token, except that tokens that only
    together make a character stand as one; a read run is one text. The texts joined are the decoded ids."""
    found: list[Stretch] = []
    position = 0
    for is_learned, run in groupby(learned):
        count = sum(1 for _ in run)
        part = list(ids[position : position + count])
        position += count
        if is_learned:
            found.append({"learned": _token_texts(tokenizer, part)})
        else:
            found.append(_shortened(_decode(tokenizer, part)))
    return found


def _token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    texts = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        text = _decode(tokenizer, pending)
        if text.endswith("\ufffd") and len(pending) < 8:  # half a character so far
            continue
        texts.append(text)
        pending = []
    return [*texts, _decode(tokenizer, pending)] if pending else texts


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text = tokenizer.decode(ids)
    assert isinstance(text, str)  # a list only for a batch
    return text


def _shortened(text: str) -> Stretch:
    if len(text) <= LONGEST_READ:
        return {"read": text}
    half = LONGEST_READ // 2
    return {"read": text[:half], "not_shown": len(text) - 2 * half, "then": text[-half:]}
