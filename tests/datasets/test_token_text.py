"""Token ids as readable text."""

from __future__ import annotations

import unicodedata
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from traceforge_core.datasets import token_text
from traceforge_core.datasets.token_text import stretches
from traceforge_core.modeling.chat import ChatRenderer


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.tuples(st.text(st.characters(codec="utf-8"), min_size=1), st.booleans()), max_size=5))
def test_the_texts_joined_are_the_text(renderer: ChatRenderer, parts: list[tuple[str, bool]]) -> None:
    ids: list[int] = []
    learned: list[bool] = []
    for text, is_learned in parts:
        (piece,) = renderer.tokens([text])
        ids += piece
        learned += [is_learned] * len(piece)
    shown = stretches(renderer.tokenizer, ids, learned)
    # Qwen's tokenizer brings text into Unicode's composed form (NFC) first: some rare characters become others.
    written = "".join(unicodedata.normalize("NFC", text) for text, _ in parts)
    assert "".join("".join(s["learned"]) if "learned" in s else s["read"] for s in shown) == written
    assert ["learned" in s for s in shown] == [
        flag for i, flag in enumerate(learned) if i == 0 or learned[i - 1] != flag
    ]


def test_bytes_of_one_character_stand_together(renderer: ChatRenderer) -> None:
    (ids,) = renderer.tokens(["a🙂b"])
    assert len(ids) == 6
    assert stretches(renderer.tokenizer, ids, [True] * 6) == [{"learned": ["a", "🙂", "b"]}]


def test_the_middle_of_a_very_long_text_is_left_out_and_said_to_be(chat_tokenizer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(token_text, "LONGEST_READ", 10)
    ids = ChatRenderer(chat_tokenizer).tokens(["0123456789abcdef"])[0]
    assert stretches(chat_tokenizer, ids, [False] * len(ids)) == [{"read": "01234", "not_shown": 6, "then": "bcdef"}]
