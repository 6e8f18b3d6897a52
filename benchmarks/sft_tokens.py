"""How many tokens the three ways of teaching all turns of a corpus take, and how fast samples are made.

    python benchmarks/sft_tokens.py PATH [--tokenizer FOLDER_OR_HUB_ID]

native: one sequence a trajectory, loss on every turn (datasets.sft.style=native). one a turn: the same rendering, one
sequence for each turn. blocks: datasets.sft.style=blocks. Nothing is trimmed. The learned tokens are the same in all.

The second table has processor time, all cores together (which other programs on the machine do not change), for the
corpus's conversations through `tokenizers` alone (encode_batch, and encode_batch_fast, which makes no offsets), each
conversation once, and for the finished samples of both styles at the configured max_length, rendering, checks and
assembly included. The best of --repeat.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from traceforge_core.config import SftDataConfig, load_config
from traceforge_core.datasets.corpus import Corpus
from traceforge_core.datasets.sft import sft_samples
from traceforge_core.modeling.chat import ChatRenderer
from traceforge_core.modeling.template_choice import choose_chat_template
from traceforge_core.trajectories.ingest import ingest
from traceforge_core.trajectories.model import Trajectory

UNLIMITED = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="folder with trajectories")
    parser.add_argument("--tokenizer", default="tiny", help="`tiny` (default), a folder, or a hub id")
    parser.add_argument("--repeat", type=int, default=3, help="measure speed so often and take the best")
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
        speeds = measure_speed(list(corpus), renderer, arguments.repeat)
    print(f"{count} trajectories, {turns} turns to learn, {learned:,} learned tokens")
    print(f"native      {native:>14,} tokens")
    print(f"one a turn  {one_a_turn:>14,} tokens   {one_a_turn / native:.1f} times native")
    print(f"blocks      {blocks:>14,} tokens   {blocks / native:.1f} times native")
    print()
    fastest = speeds["tokenizers.encode_batch_fast"]
    print(f"{'':<30} processor s   share of the speed of `tokenizers` alone")
    for name, seconds in speeds.items():
        print(f"{name:<30} {seconds:>11.2f}   {fastest / seconds:.0%}")


def measure_speed(trajectories: list[Trajectory], renderer: ChatRenderer, repeat: int) -> dict[str, float]:
    """Processor seconds of each way, the best of `repeat`."""
    trajectories = [trajectory for trajectory in trajectories if trajectory.turns]
    texts = [renderer.render(trajectory.messages, trajectory.tools) for trajectory in trajectories]
    backend = renderer.tokenizer.backend_tokenizer

    def samples(style: str) -> None:
        config = SftDataConfig.model_validate({"style": style})
        for _ in sft_samples(trajectories, renderer, config, lambda number: True, Counter()):
            pass

    ways: dict[str, Callable[[], Any]] = {
        "tokenizers.encode_batch": lambda: [one.ids for one in backend.encode_batch(texts, add_special_tokens=False)],
        "tokenizers.encode_batch_fast": lambda: [
            one.ids for one in backend.encode_batch_fast(texts, add_special_tokens=False)
        ],
        "blocks": lambda: samples("blocks"),
        "native": lambda: samples("native"),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeat):
        for name, way in ways.items():  # in turn, so that a change of the machine's clock meets all of them
            before = time.process_time()
            way()
            best[name] = min(best[name], time.process_time() - before)
    return best


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
