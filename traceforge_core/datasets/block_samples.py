"""Samples of style `blocks`: one an assistant turn, the history as text in one user message.

Each message is tokenised once for all turns that have it in their history.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import numpy as np

from traceforge_core.config import SftDataConfig
from traceforge_core.datasets.blocks import REQUEST, block, body, opening, shared_start
from traceforge_core.datasets.budget import fit_history, left_out_marker
from traceforge_core.datasets.sample import SftSample
from traceforge_core.modeling.chat import ChatRenderer, Ids
from traceforge_core.modeling.messages import RenderingError
from traceforge_core.trajectories.model import Message, Trajectory

VERIFY_EVERY = 32
"""Every so many trajectories, one prompt is rendered and tokenised whole and compared with its pieces."""


class BlockMaker:
    """Makes the samples of style `blocks`, remembering the template's frame around the user message."""

    def __init__(self, renderer: ChatRenderer, config: SftDataConfig) -> None:
        self.renderer = renderer
        self.config = config
        self._frames: dict[str, tuple[str, str]] = {}
        self._prompt: str | None = None
        self._markers: dict[int, Ids] = {}
        self._cuts_before_newline = False
        self._pieces_are_exact = True
        self._trajectories = 0

    def samples(self, trajectory: Trajectory, turns: list[int], dropped: Counter[str]) -> Iterator[SftSample]:
        """A sample for each of the turns (positions, ascending). What is not made is counted in `dropped` by reason."""
        try:
            before, after = self._frame(trajectory)
            completions = self._completions(trajectory, turns, dropped)
            if not completions:
                return
            turns = list(completions)
            shown = trajectory.messages[: turns[-1]]
            whole = [before + opening(trajectory.case), *(block(i, m) for i, m in enumerate(shown)), REQUEST + after]
            texts = self._cut(whole)
            pieces, completion_ids = self._tokens(trajectory, texts, completions)
            if self._trajectories % VERIFY_EVERY == 0 and self._pieces_are_exact:
                exact = self._verify(trajectory, shown, texts, pieces, completions, completion_ids)
                if not exact and not self._cuts_before_newline:
                    self._cuts_before_newline = True
                    self._markers.clear()
                    texts = self._cut(whole)
                    pieces, completion_ids = self._tokens(trajectory, texts, completions)
                    exact = self._verify(trajectory, shown, texts, pieces, completions, completion_ids)
                self._pieces_are_exact = exact
            self._trajectories += 1
            if not self._pieces_are_exact:
                completion_ids = self.renderer.id_arrays(list(completions.values()))
        except RenderingError:
            dropped["chat template would lose text"] += len(turns)
            return
        for (turn, completion), ids in zip(completions.items(), completion_ids, strict=True):
            sample = self._sample(trajectory, turn, completion, ids, texts, pieces)
            if sample is None:
                dropped["too long"] += 1
            else:
                yield sample

    def _sample(
        self,
        trajectory: Trajectory,
        turn: int,
        completion: str,
        completion_ids: Ids,
        texts: list[str],
        pieces: list[Ids],
    ) -> SftSample | None:
        head = min(trajectory.turns[0], turn)
        lengths = [len(piece) for piece in pieces[1 : turn + 1]]
        room = self.config.max_length - len(completion_ids) - len(pieces[0]) - len(pieces[-1])
        while True:
            fit = fit_history(lengths, head, room, lambda count: len(self._marker(count)))
            if fit is None:
                return None
            marker = [self._marker_text(fit.left_out)] if fit.left_out else []
            rest = slice(1 + head + fit.left_out, turn + 1)
            prompt = "".join([*texts[: 1 + head], *marker, *texts[rest], texts[-1]])
            if self._pieces_are_exact:
                note = [self._marker(fit.left_out)] if marker else []
                parts = [*pieces[: 1 + head], *note, *pieces[rest], pieces[-1]]
            else:
                parts = self.renderer.id_arrays([prompt])
            over = sum(map(len, parts)) + len(completion_ids) - self.config.max_length
            if over <= 0:
                break
            room -= over  # lengths of pieces are an estimate where the tokenizer merges across them
        learned = [self.config.loss_on == "everything"] * len(parts) + [True]
        if learned[0] and self._pieces_are_exact:
            # Turns that must never be learned stay out of the loss even in the plain baseline.
            kept = [*range(head), *([None] if fit.left_out else []), *range(head + fit.left_out, turn)]
            for place, position in enumerate(kept, 1):
                learned[place] = position is None or trajectory.messages[position].trainable
        return SftSample(
            sample_id=f"{trajectory.trajectory_id}#{turn}",
            case=trajectory.case,
            trajectory_id=trajectory.trajectory_id,
            turn=turn,
            prompt=prompt,
            completion=completion,
            pieces=[*parts, completion_ids],
            learned=learned,
            trimmed_messages=fit.left_out,
        )

    def _completions(self, trajectory: Trajectory, turns: list[int], dropped: Counter[str]) -> dict[int, str]:
        """Text of each turn that the template keeps. One that it does not keep costs no other turn, so that a turn is
        learnt or lost alike in whichever trajectory it is."""
        kept = {}
        for turn in turns:
            try:
                kept[turn] = self._completion(trajectory, turn)
            except RenderingError:
                dropped["chat template would lose text"] += 1
        return kept

    def _completion(self, trajectory: Trajectory, turn: int) -> str:
        # The prompt is always one user message, so what the template writes for the turn does not depend on its text.
        prompt = [Message("user", REQUEST)]
        if self._prompt is None:
            self._prompt = self.renderer.render(prompt, add_generation_prompt=True)
        return self.renderer.completion_text(self._prompt, prompt, [trajectory.messages[turn]])[0]

    def _tokens(
        self, trajectory: Trajectory, texts: list[str], completions: dict[int, str]
    ) -> tuple[list[Ids], list[Ids]]:
        """Tokens of the texts and of the completions; what a turn's block and its completion share, tokenised once."""
        parts: list[tuple[str, ...]] = [(text,) for text in texts]
        of_completions: list[tuple[str, ...]] = []
        for turn, completion in completions.items():
            cut = shared_start(body(trajectory.messages[turn]), completion)
            of_completions.append((completion[:cut], completion[cut:]) if cut else (completion,))
            if cut and turn + 1 < len(parts) - 1:  # the last turn's block is in no prompt
                text = texts[turn + 1]
                start = text.index("\n", 1) + 1
                parts[turn + 1] = (text[:start], text[start : start + cut], text[start + cut :])
        strings = list(dict.fromkeys(chain.from_iterable([*parts, *of_completions])))
        known = dict(zip(strings, self.renderer.id_arrays(strings), strict=True))
        pieces, ids = (
            [np.concatenate([known[string] for string in part]) for part in of] for of in (parts, of_completions)
        )
        return pieces, ids

    def _frame(self, trajectory: Trajectory) -> tuple[str, str]:
        """What the template puts before and behind the text of the one user message."""
        key = json.dumps(trajectory.tools)
        if key not in self._frames:
            sentinel = "THE-HISTORY-GOES-HERE"
            text = self.renderer.render([Message("user", sentinel)], trajectory.tools, add_generation_prompt=True)
            before, found, after = text.partition(sentinel)
            if not found:
                raise RenderingError("The chat template lost the user message.")
            self._frames[key] = before, after
        return self._frames[key]

    def _cut(self, whole: list[str]) -> list[str]:
        """The pieces, each ending behind its empty line, or, where the tokenizer asks for it, inside it."""
        if not self._cuts_before_newline:
            return whole
        return [whole[0][:-1], *("\n" + text[:-1] for text in whole[1:-1]), "\n" + whole[-1]]

    def _marker_text(self, count: int) -> str:
        note = left_out_marker(count)
        return f"\n{note}\n" if self._cuts_before_newline else f"{note}\n\n"

    def _marker(self, count: int) -> Ids:
        if count not in self._markers:
            self._markers[count] = self.renderer.id_arrays([self._marker_text(count)])[0]
        return self._markers[count]

    def _verify(
        self,
        trajectory: Trajectory,
        shown: list[Message],
        texts: list[str],
        pieces: list[Ids],
        completions: dict[int, str],
        completion_ids: list[Ids],
    ) -> bool:
        """Whether the pieces give the very tokens of the whole prompt and of the whole completions, and the prompt is
        what the template renders."""
        content = opening(trajectory.case) + "".join(block(i, m) for i, m in enumerate(shown)) + REQUEST
        whole = self.renderer.render([Message("user", content)], trajectory.tools, add_generation_prompt=True)
        if whole != "".join(texts):
            raise RenderingError(
                "The chat template changes the text of a user message; set model.chat_template=chatml."
            )
        tokens = self.renderer.id_arrays([whole, *completions.values()])
        return all(map(np.array_equal, tokens, [np.concatenate(pieces), *completion_ids]))
