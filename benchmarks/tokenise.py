"""How fast the stage `datasets` tokenises a large corpus, against `tokenizers` alone on the same cores.

    python benchmarks/tokenise.py --megabytes 200 --workers 2

Writes a corpus as ingest.py does into a temporary folder, reads it, and deletes it. Then, in turn and `--repeat` times:
`tokenizers` alone on the text of every conversation, whole, 64 at a time, on all cores (encode_batch, and
encode_batch_fast, which makes no offsets), its results looked at and thrown away; and the whole stage for each style:
reading the corpus twice, start of the processes, rendering, checks, tokens, labels, Parquet, report. Printed: seconds
by the clock and of processor time (which other programs on the machine change less), both as a share of the speed of
encode_batch_fast, the highest memory of all processes of the stage together, and the load of the machine. A style
`blocks` sample has the history in it, so the stage writes many times the tokens that it is measured against; it
tokenises each text of a conversation once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ingest import watch_memory, write_corpus
from sft_tokens import load_tokenizer

from traceforge_core.config import load_config
from traceforge_core.datasets.build import build_datasets
from traceforge_core.datasets.corpus import Corpus
from traceforge_core.modeling.chat import ChatRenderer, load_renderer
from traceforge_core.trajectories.ingest import ingest

TEXTS_AT_ONCE = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200.0, help="size of the corpus as JSON")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=2, help="measure so often; the best of each is taken")
    parser.add_argument("--tokenizer", default="tiny", help="`tiny` (default), a folder, or a hub id")
    parser.add_argument("--styles", default="native,blocks")
    parser.add_argument("--folder", type=Path, default=None, help="where to work (default: the system's)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="tokenise-benchmark-") as name:
        folder = Path(name)
        write_corpus(folder / "corpus", int(options.megabytes * 1e6))
        (folder / "ingest").mkdir()
        ingest(load_config(assignments=[f"ingest.path={folder / 'corpus'}"]), {}, folder / "ingest")
        load_tokenizer(options.tokenizer).save_pretrained(folder / "model" / "tokenizer")
        renderer = load_renderer(folder / "model")
        characters = sum(len(text) for text in texts_of(folder, renderer))
        count = Corpus(folder / "ingest").count
        print(f"{count} trajectories, {characters / 1e6:.1f} MB of text, {options.workers} workers")
        best, written, peaks = measure(folder, renderer, options)
    print()
    clock, cpu = best["tokenizers.encode_batch_fast"]
    print(f"{'':<30} {'clock s':>8} {'share':>6} {'processor s':>12} {'share':>6}  tokens written  peak MiB")
    for what, (seconds, used) in best.items():
        tokens = f"{written[what]:>14,} {peaks[what] >> 20:>9}" if what in written else ""
        print(f"{what:<30} {seconds:>8.1f} {clock / seconds:>6.0%} {used:>12.1f} {cpu / used:>6.0%}  {tokens}")


def measure(
    folder: Path, renderer: ChatRenderer, options: argparse.Namespace
) -> tuple[dict[str, tuple[float, float]], dict[str, int], dict[str, int]]:
    """Best (clock, processor) seconds of each way; how many tokens each style of samples has; and how many bytes all
    processes held meanwhile."""
    backend = renderer.tokenizer.backend_tokenizer
    written: dict[str, int] = {}
    peaks: dict[str, int] = {}

    def alone(encode: Callable[..., Any], watch: Watch) -> None:
        texts = texts_of(folder, renderer)
        while lot := list(islice(texts, TEXTS_AT_ONCE)):
            with watch:
                for encoding in encode(lot, add_special_tokens=False):
                    assert encoding.ids

    def stage(style: str, watch: Watch) -> None:
        out = folder / "out"
        out.mkdir()
        stop, seen = threading.Event(), {"all": 0, "parent": 0}
        watcher = threading.Thread(target=watch_memory, args=(stop, seen), daemon=True)
        watcher.start()
        with watch:
            figures = build_datasets(stage_config(folder, style, options.workers), inputs_of(folder), out)
        stop.set()
        watcher.join()
        written[style] = figures["sft_tokens"]
        peaks[style] = max(seen["all"], peaks.get(style, 0))
        shutil.rmtree(out)

    ways: dict[str, Callable[[Watch], None]] = {
        "tokenizers.encode_batch_fast": partial(alone, backend.encode_batch_fast),
        **{style: partial(stage, style) for style in options.styles.split(",")},
        "tokenizers.encode_batch": partial(alone, backend.encode_batch),
    }
    best = dict.fromkeys(ways, (float("inf"), float("inf")))
    for number in range(options.repeat):
        print(f"round {number + 1}: load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores", flush=True)
        for what, way in ways.items():
            watch = Watch()
            way(watch)
            best[what] = min(best[what][0], watch.clock), min(best[what][1], watch.cpu)
            print(f"{what:<30} {watch.clock:>8.1f} s by the clock {watch.cpu:>8.1f} s of processor time", flush=True)
    return best, written, peaks


class Watch:
    """Clock and processor seconds (children included) spent inside `with`, all times together."""

    def __init__(self) -> None:
        self.clock = self.cpu = 0.0

    def __enter__(self) -> None:
        self._begun = time.perf_counter(), sum(os.times()[:4])

    def __exit__(self, *_: object) -> None:
        self.clock += time.perf_counter() - self._begun[0]
        self.cpu += sum(os.times()[:4]) - self._begun[1]


def texts_of(folder: Path, renderer: ChatRenderer) -> Iterator[str]:
    """Every conversation as the model sees it."""
    for trajectory in Corpus(folder / "ingest"):
        if trajectory.turns:
            yield renderer.render(trajectory.messages, trajectory.tools)


def inputs_of(folder: Path) -> dict[str, Path]:
    return {"ingest": folder / "ingest", "model": folder / "model"}


def stage_config(folder: Path, style: str, workers: int) -> Any:
    """SFT samples of everything, and one given pair, since the stage wants pairs too."""
    given = folder / "given.jsonl"
    given.write_text(json.dumps({"prompt": "Ask.", "chosen": "Yes.", "rejected": "No.", "case": "given"}) + "\n")
    return load_config(
        assignments=[
            f"datasets.sft.style={style}",
            "datasets.sft.max_length=32768",
            "datasets.sft.max_samples=null",
            "datasets.split.held_out=0",
            "datasets.preference.miners=[given]",
            f"datasets.preference.given={given}",
            f"datasets.workers={workers}",
        ]
    )


if __name__ == "__main__":
    main()
