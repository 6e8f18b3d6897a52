"""What more GPUs bring: pairs an hour of both strategies on 2, 4 and 8 workers, and whether they agree.

    python benchmarks/scaling.py --out results                          # everything that this machine has GPUs for
    python benchmarks/scaling.py --workers 2,4 --lengths 32768 --strategies shared_prefix
    python benchmarks/scaling.py --tiny                                 # a try on the CPU over gloo, some minutes

Sections:
  speed     a step of one pair for each replica: pairs an hour, share of a step in exchanges, peak memory of the fullest
            GPU; efficiency is pairs an hour over workers / 2 times those of the two-worker run
  equality  three steps of the same pairs on every number of workers: how far losses and final adapter are from those
            of two workers that accumulate them. `two workers again` is what the device itself leaves to chance

branch_parallel has a worker a branch, so 2·D workers are D replicas; shared_prefix has a replica a worker. Qwen3-8B is
built from its shape with random weights (NF4, LoRA r=16), pairs are random tokens of equal length, 95% of them prompt.
Figures are medians over the steps after the first, read from the step logs of ordinary training stages.

OUT/scaling.jsonl has each figure as soon as it is there, scaling.md and scaling.png are drawn from all of it: calls on
several machines may share a folder. What cannot run here is said and skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.measured import Measured, Row, table  # noqa: E402
from benchmarks.random_weights import BIG, SHAPES, built_model, configuration, write_random_pairs  # noqa: E402
from traceforge_core.errors import TraceForgeError  # noqa: E402
from traceforge_core.training import stages  # noqa: E402
from traceforge_core.training.job import Kind  # noqa: E402
from traceforge_core.training.records import read_records  # noqa: E402

SECTIONS = ("speed", "equality")
STRATEGIES: dict[str, int] = {"branch_parallel": 2, "shared_prefix": 1}  # workers a replica
EQUAL_STEPS = 3
KEY = ("section", "strategy", "length", "workers")
AGAIN = "two workers again"


def main() -> None:
    options = parse_arguments()
    measured = Measured(options.out / "scaling.jsonl", KEY)
    for strategy in options.strategies:
        if "speed" in options.sections:
            for length in options.lengths:
                for workers in options.workers:
                    measure_speed(options, measured, strategy, length, workers)
        if "equality" in options.sections:
            measure_equality(options, measured, strategy)
    report = markdown(measured)
    (options.out / "scaling.md").write_text(report, encoding="utf-8")
    draw(measured.rows("speed"), options.out / "scaling.png")
    print(report)


def parse_arguments() -> argparse.Namespace:
    def listed(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", type=listed, default=list(SECTIONS))
    parser.add_argument("--strategies", type=listed, default=list(STRATEGIES))
    parser.add_argument("--workers", type=numbers, default=[2, 4, 8], help="even numbers (default: 2,4,8)")
    parser.add_argument("--lengths", type=numbers, help="tokens a branch in speed; default: 32768,81920")
    parser.add_argument("--equal-length", type=int, help="tokens a branch in equality; default: 4096")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of a run in speed, warm-up included")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, 64 tokens a branch")
    parser.add_argument("--transport", choices=("auto", "nccl", "gloo"), default="auto")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/traceforge-benchmark"), help="models and runs")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "results")))
    options = parser.parse_args()
    for name, allowed in (("sections", SECTIONS), ("strategies", STRATEGIES)):
        if unknown := set(getattr(options, name)) - set(allowed):
            parser.error(f"unknown {name}: {', '.join(sorted(unknown))} (there are {', '.join(allowed)})")
    if any(workers < 2 or workers % 2 for workers in options.workers) or options.steps < 2:
        parser.error("numbers of workers are even, and at least two steps are needed (the first is a warm-up)")
    options.model, options.device = ("tiny", "cpu") if options.tiny else (BIG, "cuda")
    options.lengths = options.lengths or ([64] if options.tiny else [32_768, 81_920])
    options.equal_length = options.equal_length or (64 if options.tiny else 4096)
    return options


def measure_speed(options: argparse.Namespace, measured: Measured, strategy: str, length: int, workers: int) -> None:
    """A pair for each replica in every step."""
    replicas = workers // STRATEGIES[strategy]
    with measured.reported(section="speed", strategy=strategy, length=length, workers=workers) as record:
        with trained(options, strategy, length, workers, pairs=replicas, steps=options.steps) as folder:
            steps = read_records(folder / "metrics.jsonl")
            seconds = median(step.seconds or math.nan for step in steps[1:])
            record(
                pairs_an_hour=3600 * replicas / seconds,
                seconds_a_step=seconds,
                communication_share=median(step.exchange_seconds for step in steps[1:]) / seconds,
                peak_gib=max(step.peak_memory_mib or 0.0 for step in steps) / 1024,
                steps=len(steps),
                **surroundings(folder),
            )


def measure_equality(options: argparse.Namespace, measured: Measured, strategy: str) -> None:
    """Every number of workers against two, which accumulate what the others compute side by side."""
    pairs, length = max(options.workers) // STRATEGIES[strategy], options.equal_length
    rows: dict[int | str, int] = {2: 2, AGAIN: 2} | {workers: workers for workers in options.workers}
    with contextlib.ExitStack() as kept:
        reference: Path | None = None
        for label, workers in rows.items():
            with measured.reported(section="equality", strategy=strategy, length=length, workers=label) as record:
                if reference is None and label != 2:
                    raise TraceForgeError("the run on two workers is missing, so there is nothing to compare with")
                folder = kept.enter_context(trained(options, strategy, length, workers, pairs=pairs, steps=EQUAL_STEPS))
                reference = reference or folder
                record(**apart(folder, reference), pairs_a_step=pairs, **surroundings(folder))


@contextlib.contextmanager
def trained(
    options: argparse.Namespace, strategy: str, length: int, workers: int, *, pairs: int, steps: int
) -> Iterator[Path]:
    """The folder of a stage that took so many steps of so many pairs; it is gone afterwards."""
    kind: Kind = "branch_parallel" if strategy == "branch_parallel" else "shared_prefix"
    replicas = workers // STRATEGIES[strategy]
    model = built_model(options.model, options.work / options.model, options.device)
    datasets = options.work / f"pairs-{options.model}-{length}-{pairs}"
    write_random_pairs(datasets, SHAPES[options.model], length, count=pairs)
    config = configuration(
        options.model,
        options.device,
        length,
        steps,
        preference__replicas=replicas,
        preference__gradient_accumulation=pairs // replicas,
        preference__transport=options.transport,
    )
    with tempfile.TemporaryDirectory(prefix="scaling-", dir=options.work) as scratch:
        folder = Path(scratch) / kind
        stages.run_job(
            stages.preference_job(kind, config, {"model": model, "datasets": datasets, "sft": model}, folder),
            on_line=quiet,
        )
        yield folder


def apart(folder: Path, reference: Path) -> Row:
    """How far a run is from another that was to take the same pairs: losses, and the final adapter (relative L2)."""
    from traceforge_core.modeling.adapters import read_adapter, relative_difference

    own, other = (read_records(each / "metrics.jsonl") for each in (folder, reference))
    adapter, _, _ = relative_difference(read_adapter(folder / "adapter"), read_adapter(reference / "adapter"))
    return {
        "adapter_difference": adapter,
        "largest_loss_difference": max(abs(a.loss - b.loss) for a, b in zip(own, other, strict=True)),
        "same_pairs": [step.data for step in own] == [step.data for step in other],
        "steps": len(own),
    }


def surroundings(folder: Path) -> Row:
    """What a stage ran on."""
    training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    return {"device": training["device_name"], "transport": training["transport"]}


def markdown(measured: Measured) -> str:
    """The tables, speed with its efficiency."""
    parts = ["# Scaling\n"]
    if speed := measured.rows("speed"):
        parts.append(f"## speed\n\n{table([row | efficiency(row, speed) for row in speed])}\n")
    if equality := measured.rows("equality"):
        parts.append(f"## equality\n\n{table(equality)}\n")
    return "\n".join(parts)


def efficiency(row: Row, rows: Sequence[Row]) -> Row:
    """Pairs an hour over what so many times the two-worker run would give; nothing where either is missing."""
    two = next((r for r in rows if r["workers"] == 2 and all(r[n] == row[n] for n in ("strategy", "length"))), {})
    if "pairs_an_hour" not in row or "pairs_an_hour" not in two:
        return {}
    return {"efficiency": row["pairs_an_hour"] / two["pairs_an_hour"] / (row["workers"] / 2)}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Pairs an hour and share of communication by number of workers, a line a strategy and length."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    speed, share = figure.subplots(1, 2)
    lines: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if "pairs_an_hour" in row:
            lines.setdefault((row["strategy"], row["length"]), []).append(row)
    for number, ((strategy, length), found) in enumerate(lines.items()):
        found.sort(key=lambda row: row["workers"])
        workers = [row["workers"] for row in found]
        style: dict[str, Any] = {"color": f"C{number}", "marker": "o"}
        speed.plot(workers, [row["pairs_an_hour"] for row in found], label=f"{strategy}, {length:,} tokens", **style)
        if found[0]["workers"] == 2:
            ideal = [found[0]["pairs_an_hour"] * count / 2 for count in workers]
            speed.plot(workers, ideal, color=f"C{number}", linestyle=":", linewidth=1)
        share.plot(workers, [100 * row["communication_share"] for row in found], **style)
    speed.set_ylabel("pairs an hour (dotted: in proportion to two workers)")
    share.set_ylabel("share of a step in exchanges, %")
    for axis in (speed, share):
        axis.set_xlabel("workers")
        axis.set_ylim(bottom=0)
        axis.set_xticks(sorted({row["workers"] for row in rows}))
        axis.grid(alpha=0.3)
    if lines:
        speed.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def quiet(rank: int, line: str) -> None:
    """Workers' output stays in their logs."""


if __name__ == "__main__":
    main()
