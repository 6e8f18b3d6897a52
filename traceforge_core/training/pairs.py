"""A Parquet file of preference pairs as the dataset that TRL's CPOTrainer trains on: tokens, not text.

The datasets stage has rendered and tokenised every pair once; every strategy sees exactly those tokens. TRL would
tokenise again (and get a Qwen3 completion's end, its tools and its earlier reasoning wrong), so it is given this
dataset, whose `map` does nothing, instead of one of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from traceforge_core.errors import TraceForgeError

COLUMNS = ["pair_id", "prompt_ids", "chosen_ids", "rejected_ids", "chosen_mask", "rejected_mask"]
IGNORED = -100


class PairDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Pairs by index, in the columns of TRL's `DPODataCollatorWithPadding`.

    An item has `pair_id` and, for chosen and rejected, `<branch>_input_ids` (prompt + completion),
    `<branch>_attention_mask` (ones) and `<branch>_labels` (-100 on the prompt and on every completion token that must
    not count, such as an observation in the middle), each a list of int; and `prompt_input_ids`,
    `prompt_attention_mask`. With `cut_to`, no branch is longer: completions lose their end beyond half of it, prompts
    their beginning, the same in both branches; for comparing computations, not for learning. Raises
    TraceForgeError where the file is empty or a branch has no token that counts (left, where it is cut).
    """

    def __init__(self, path: Path, cut_to: int | None = None) -> None:
        self._cut_to = cut_to
        try:
            self._table: pa.Table = pq.read_table(path, columns=COLUMNS)
        except (OSError, pa.ArrowInvalid) as error:
            raise TraceForgeError(f"Cannot read the preference pairs in {path}: {error}") from None
        if self._table.num_rows == 0:
            raise TraceForgeError(
                f"There are no preference pairs in {path}. The report of the datasets stage says why; more runs a "
                "case, another miner or a greater datasets.preference.max_length may give some."
            )
        for index in range(self._table.num_rows):
            row = self._row(index)
            for branch in ("chosen", "rejected"):
                mask = row[f"{branch}_mask"]
                # A first token with nothing before it is predicted by none. Of no token, the score would be 0/0, and
                # every weight NaN after one step.
                if not any(mask if row["prompt_ids"] else mask[1:]):
                    cure = "Build the datasets again." if cut_to is None else "Raise comparison.oracle_max_length."
                    after = "" if cut_to is None else f", cut to {cut_to // 2} tokens,"
                    raise TraceForgeError(
                        f"Pair {row['pair_id']} in {path}: no token of its {branch} completion{after} counts in the "
                        f"score. {cure}"
                    )

    def __len__(self) -> int:
        rows: int = self._table.num_rows
        return rows

    def _row(self, index: int) -> dict[str, Any]:
        row = {name: self._table.column(name)[index].as_py() for name in COLUMNS}
        if self._cut_to is not None:
            for name in COLUMNS[2:]:
                row[name] = row[name][: self._cut_to // 2]
            room = self._cut_to - max(len(row["chosen_ids"]), len(row["rejected_ids"]))
            row["prompt_ids"] = row["prompt_ids"][-room:]
        return row

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._row(index)
        prompt = row["prompt_ids"]
        item: dict[str, Any] = {
            "pair_id": row["pair_id"],
            "prompt_input_ids": prompt,
            "prompt_attention_mask": [1] * len(prompt),
        }
        for branch in ("chosen", "rejected"):
            ids, mask = row[f"{branch}_ids"], row[f"{branch}_mask"]
            item[f"{branch}_input_ids"] = prompt + ids
            item[f"{branch}_attention_mask"] = [1] * (len(prompt) + len(ids))
            item[f"{branch}_labels"] = [IGNORED] * len(prompt) + [
                token if counts else IGNORED for token, counts in zip(ids, mask, strict=True)
            ]
        return item

    def map(self, function: Callable[..., Any], **options: Any) -> PairDataset:
        """Itself: CPOTrainer's constructor maps its tokenisation over the dataset, which is done already."""
        return self

    def fingerprint(self) -> str:
        """Hash of every pair's tokens, masks and id, in order."""
        digest = hashlib.sha256()
        for index in range(len(self)):
            digest.update(repr(self._row(index)).encode())
        return digest.hexdigest()

    def longest(self) -> int:
        """Tokens of the longest branch."""
        return max(
            len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))
            for row in map(self._row, range(len(self)))
        )
