"""Conversations as the model sees them: text, tokens, and which tokens the model must produce.

    renderer = load_renderer(run / "model")
    encoded = renderer.encode(trajectory.messages, trajectory.tools)      # encoded.assistant_mask: 1 = learn this

Everything goes through the tokenizer's own chat template. The text is cut where each assistant turn begins and ends and
every piece is tokenised by itself: generation stops a prompt at just these places, so the tokens of a prompt never
depend on what comes after it. What the template does not keep is an error (RenderingError), never a silent loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from traceforge_core.errors import TraceForgeError, page
from traceforge_core.modeling.messages import RenderingError, chat_dict, check_nothing_lost, texts_of
from traceforge_core.trajectories.model import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
Tools = Sequence[Mapping[str, Any]] | None
Span = tuple[int, int]
Ids = npt.NDArray[np.int32]
NO_IDS: Ids = np.empty(0, np.int32)


class TurnSpan(NamedTuple):
    """The model's part of a turn, end-of-turn token included: first and behind last, in tokens and in characters."""

    start: int
    end: int
    text_start: int
    text_end: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """A whole conversation. `assistant_mask` has one 0 or 1 for each of `input_ids`, int32 both; `turns` says where the
    model's part of each assistant turn lies."""

    text: str
    input_ids: Ids
    assistant_mask: Ids
    turns: list[TurnSpan]


@dataclass(frozen=True, slots=True)
class EncodedCompletion:
    """A prompt and what follows it; the prompt ends where the model begins to write, the completion with its end of
    turn. `completion_mask` has one 0 or 1 for each of `completion_ids`: observations between turns are 0. Ids and mask
    are int32."""

    prompt_text: str
    completion_text: str
    prompt_ids: Ids
    completion_ids: Ids
    completion_mask: Ids


class ChatRenderer:
    """Renders and tokenises with one tokenizer and its chat template.

    `end_of_turn` is the token that the template writes behind an assistant turn. Raises TraceForgeError where the
    tokenizer has no chat template, or the template closes a turn with no token of its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise TraceForgeError(
                f"The tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template. "
                f"Set model.chat_template to chatml (or llama3), or name a chat model. {page('chat-template')}"
            )
        self.tokenizer = tokenizer
        self.end_of_turn = self._find_end_of_turn()
        self._trusts_marks = self._marks_begin_where_prompts_end()

    def render(self, messages: Sequence[Message], tools: Tools = None, add_generation_prompt: bool = False) -> str:
        """The text of a conversation. Raises RenderingError where the template refuses it."""
        return self._render(messages, tools, add_generation_prompt)[0]

    def encode(self, messages: Sequence[Message], tools: Tools = None, known: dict[str, Ids] | None = None) -> Encoded:
        """Tokens of a whole conversation, 1 on exactly what the model must produce in trainable turns: reasoning, text,
        calls and the end-of-turn token. `known` keeps the tokens of what lies between and in the turns, for another
        call with the same turns.

        Raises RenderingError where a text of `messages` is missing from the rendered text, or nothing is left to learn.
        """
        text, spans = self._turns(messages, tools)
        check_nothing_lost(messages, text)
        ids, mask, turns = self._encode_spans(text, spans, _trainable(messages), known)
        if not mask.any():
            raise RenderingError("This conversation has no assistant turn to learn from.")
        return Encoded(text, ids, mask, turns)

    def encode_completion(
        self, prompt_messages: Sequence[Message], completion_messages: Sequence[Message], tools: Tools = None
    ) -> EncodedCompletion:
        """Tokens of a prompt and of its completion. `completion_messages` begin and end with an assistant turn.

        `prompt_ids` are a function of `prompt_messages` and `tools` alone. Raises RenderingError as `encode` does, and
        where the template renders the prompt differently once a completion follows.
        """
        prompt_text = self.render(prompt_messages, tools, add_generation_prompt=True)
        completion_text, spans, inside = self.completion_text(prompt_text, prompt_messages, completion_messages, tools)
        prompt_ids, _, _ = self._encode_spans(prompt_text, spans, [False] * len(spans))
        ids, mask, _ = self._encode_spans(completion_text, inside, _trainable(completion_messages))
        return EncodedCompletion(prompt_text, completion_text, prompt_ids, ids, mask)

    def completion_text(
        self,
        prompt_text: str,
        prompt_messages: Sequence[Message],
        completion_messages: Sequence[Message],
        tools: Tools = None,
    ) -> tuple[str, list[Span], list[Span]]:
        """The text of a completion behind a prompt that is rendered as `prompt_text`; where the model's parts lie in
        the prompt, and where in the completion. Raises what `encode_completion` raises."""
        if not completion_messages or any(completion_messages[i].role != "assistant" for i in (0, -1)):
            raise RenderingError("A completion must begin and end with an assistant turn.")
        text, spans = self._turns([*prompt_messages, *completion_messages], tools)
        begin, end = len(prompt_text), spans[-1][1]
        before = sum(message.role == "assistant" for message in prompt_messages)
        if not text.startswith(prompt_text) or spans[before][0] != begin:
            raise RenderingError(
                "The chat template renders the prompt differently once a completion follows, so chosen and rejected "
                "would not share it. Set model.chat_template to chatml (or llama3)."
            )
        check_nothing_lost([*prompt_messages, *completion_messages], text)
        return text[begin:end], spans[:before], [(start - begin, stop - begin) for start, stop in spans[before:]]

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Tokens of a prompt, up to where the model begins to write. Raises RenderingError as `encode` does."""
        text, spans = self._turns(messages, tools)
        check_nothing_lost(messages, text)
        ids: list[int] = self._encode_spans(self.render(messages, tools, True), spans, [False] * len(spans))[0].tolist()
        return ids

    def tokens(self, pieces: Sequence[str]) -> list[list[int]]:
        """Token ids of each piece by itself, with nothing added at its ends."""
        if not pieces:
            return []
        if self.tokenizer.is_fast:
            # What the call below comes to, without the offsets and masks that nobody asks for: twice as fast.
            backend: Any = self.tokenizer.backend_tokenizer
            backend.no_truncation()
            backend.no_padding()
            backend.encode_special_tokens = self.tokenizer.split_special_tokens
            return [encoding.ids for encoding in backend.encode_batch_fast(list(pieces), add_special_tokens=False)]
        ids: list[list[int]] = self.tokenizer(
            list(pieces),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return ids

    def id_arrays(self, pieces: Sequence[str]) -> list[Ids]:
        """What `tokens` gives, as int32 arrays: a fifth of the memory, and cheap to join."""
        return [np.array(ids, np.int32) if ids else NO_IDS for ids in self.tokens(pieces)]

    def _encode_spans(
        self,
        text: str,
        spans: Sequence[Span],
        wanted: Sequence[bool],
        known: dict[str, Ids] | None = None,
    ) -> tuple[Ids, Ids, list[TurnSpan]]:
        pieces, position = [], 0
        for start, end in spans:
            pieces += [text[position:start], text[start:end]]
            position = end
        pieces.append(text[position:])
        known = {} if known is None else known
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in known]
        known.update(zip(missing, self.id_arrays(missing), strict=True))
        arrays = [known[piece] for piece in pieces]
        ids = np.concatenate(arrays)
        mask = np.zeros(len(ids), np.int32)
        borders = [0, *accumulate(map(len, arrays))]
        turns = []
        for number, (span, want) in enumerate(zip(spans, wanted, strict=True)):
            turn = TurnSpan(borders[2 * number + 1], borders[2 * number + 2], *span)
            mask[turn.start : turn.end] = want
            turns.append(turn)
        return ids, mask, turns

    def _turns(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[Span]]:
        """The text, and of each assistant turn where the model's part begins and ends in it (characters)."""
        if self._trusts_marks:
            text, marked = self._render(messages, tools)
            turns = [message for message in messages if message.role == "assistant"]
            if len(marked) != len(turns):
                raise RenderingError(
                    f"The chat template marks {len(marked)} of {len(turns)} assistant turns as generated."
                )
            return text, [self._with_end_of_turn(text, span) for span in marked]
        return self._turns_by_prefix(messages, tools)

    def _turns_by_prefix(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[Span]]:
        text = self.render(messages, tools)
        spans = []
        for position, message in enumerate(messages):
            if message.role != "assistant":
                continue
            prompt = self.render(messages[:position], tools, add_generation_prompt=True)
            if not text.startswith(prompt):
                raise RenderingError(
                    f"The chat template changes what stands before assistant turn {position} once more follows. "
                    "Set model.chat_template to chatml (or llama3)."
                )
            # The turn may quote the token (an agent that reads a template file); its own is the one behind those.
            quoted = sum(own.count(self.end_of_turn) for own in texts_of(message))
            end = len(prompt)
            for _ in range(quoted + 1):
                found = text.find(self.end_of_turn, end)
                if found < 0:
                    raise RenderingError(f"Assistant turn {position} is not closed by {self.end_of_turn}.")
                end = found + len(self.end_of_turn)
            spans.append((len(prompt), end))
        return text, spans

    def _with_end_of_turn(self, text: str, span: Span) -> Span:
        """The marked part, made to end exactly behind the end-of-turn token: templates mark it with, without, or with a
        newline behind it."""
        start, end = span
        trimmed = start + len(text[start:end].rstrip())
        if text.startswith(self.end_of_turn, trimmed - len(self.end_of_turn)) and trimmed > start:
            return start, trimmed
        following = end + len(text[end : end + 16]) - len(text[end : end + 16].lstrip())
        if text.startswith(self.end_of_turn, following):
            return start, following + len(self.end_of_turn)
        raise RenderingError(f"An assistant turn is not closed by {self.end_of_turn}.")

    def _render(
        self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        definitions: Any = [dict(tool) for tool in tools] if tools else None
        template = self.tokenizer.get_chat_template(None, definitions)
        marks = GENERATION_MARK.search(template) is not None
        special: dict[str, Any] = self.tokenizer.special_tokens_map  # templates name bos_token and the like
        try:
            rendered: Any = render_jinja_template(
                conversations=[[chat_dict(message) for message in messages]],
                tools=definitions,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=add_generation_prompt,
                **special,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise RenderingError(f"The chat template refuses this conversation: {error}") from None
        (text,), spans = rendered
        return text, [(start, end) for start, end in spans[0]] if marks else []

    def _find_end_of_turn(self) -> str:
        tail = self.render([Message("user", "Q1"), Message("assistant", "A1")]).rpartition("A1")[2].lstrip()
        known = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
        closing = [token for token in known if tail.startswith(token)]
        if not closing:
            raise TraceForgeError(
                "The chat template closes an assistant turn with no token of its own, so a model could not learn to "
                "stop. Set model.chat_template to chatml (or llama3), or name a chat model."
            )
        return max(closing, key=len)

    def _marks_begin_where_prompts_end(self) -> bool:
        """Marks that take in the turn's header, or leave out part of a turn, would put the loss on the wrong tokens."""
        probe = [Message("user", "Q1"), Message("assistant", "A1"), Message("user", "Q2"), Message("assistant", "A2")]
        text, marked = self._render(probe, None)
        if len(marked) != 2:
            return False
        return [self._with_end_of_turn(text, span) for span in marked] == self._turns_by_prefix(probe, None)[1]


def load_renderer(model_dir: Path, kind: type[PreTrainedTokenizerBase] | None = None) -> ChatRenderer:
    """The renderer of a finished `model` stage. `kind` is the tokenizer's class where somebody knows it: looking for it
    imports half of transformers, a second more."""
    if kind is None:
        from transformers import AutoTokenizer

        return ChatRenderer(AutoTokenizer.from_pretrained(model_dir / "tokenizer"))
    return ChatRenderer(kind.from_pretrained(model_dir / "tokenizer"))


def _trainable(messages: Sequence[Message]) -> list[bool]:
    return [message.trainable for message in messages if message.role == "assistant"]
