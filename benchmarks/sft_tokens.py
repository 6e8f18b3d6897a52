"""How many tokens the three ways of teaching all turns of a corpus take.

    python benchmarks/sft_tokens.py PATH [--tokenizer FOLDER_OR_HUB_ID]

native: one sequence a trajectory, loss on every turn (datasets.sft.style=native). one a turn: the same rendering, one
sequence for each turn. blocks: datasets.sft.style=blocks. Nothing is trimmed. The learned tokens are the same in all.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from traceforge_core.config import SftDataConfig, load_config
from traceforge_core.datasets.corpus import Corpus
from traceforge_core.datasets.sft import sft_samples
from traceforge_core.modeling.chat import ChatRenderer, choose_chat_template
from traceforge_core.trajectories.ingest import ingest

UNLIMITED = 1 << 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="folder with trajectories")
    parser.add_argument("--tokenizer", default="tiny", help="`tiny` (default), a folder, or a hub id")
    arguments = parser.parse_args()
    renderer = ChatRenderer(load_tokenizer(arguments.tokenizer))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ingest(load_config(assignments=[f"ingest.path={arguments.path}"]), {}, folder)
        corpus = Corpus(folder)
        turns = native = one_a_turn = learned = 0
        for trajectory in corpus:
            encoded = renderer.encode(trajectory.messages, trajectory.tools) if trajectory.turns else None
            if encoded is None:
                continue
            native += encoded.turns[-1].end
            learned += sum(encoded.assistant_mask)
            for turn in encoded.turns:
                if encoded.assistant_mask[turn.start]:
                    one_a_turn += turn.end
                    turns += 1
        config = SftDataConfig(style="blocks", max_length=UNLIMITED)
        blocks = sum(len(s.input_ids) for s in sft_samples(corpus, renderer, config, lambda number: True, Counter()))
        count = corpus.count
    print(f"{count} trajectories, {turns} turns to learn, {learned:,} learned tokens")
    print(f"native      {native:>14,} tokens")
    print(f"one a turn  {one_a_turn:>14,} tokens   {one_a_turn / native:.1f} times native")
    print(f"blocks      {blocks:>14,} tokens   {blocks / native:.1f} times native")


def load_tokenizer(name: str) -> Any:
    if name == "tiny":
        from traceforge_core.modeling.tiny import tiny_tokenizer

        return tiny_tokenizer()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    choose_chat_template(tokenizer, "auto")
    return tokenizer


if __name__ == "__main__":
    main()
