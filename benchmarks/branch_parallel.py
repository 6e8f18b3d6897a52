"""Branch-Parallel SimPO on real GPUs: does it compute what TRL computes, how fast, in how much memory?

    python benchmarks/branch_parallel.py --out results                               # everything, two GPUs
    python benchmarks/branch_parallel.py --sections parity32,parity16 --lengths 2048,8192
    python benchmarks/branch_parallel.py --sections speed --lengths 81920 --backends transformers --transports nccl
    python benchmarks/branch_parallel.py --device cpu --model tiny --lengths 64,128   # a try without a GPU, a minute

Sections:
  parity32  float32, a small Qwen3: losses and gradients against TRL's CPOTrainer
  parity16  the model in bf16 (NF4 on a GPU): the same, beside the oracle's difference from itself with branches swapped
  speed     seconds and peak memory a step: oracle, one GPU doing both branches in turn, Branch-Parallel on two
  cap       Branch-Parallel at the longest length with every GPU limited to --cap GiB, and the GPU monitor beside it

Every figure is that of a training stage in its own worker processes, read from its step log; the first step (warm-up,
compilation) is left out. Qwen3-8B is built from its shape with random weights: nothing is downloaded. Pairs are random
tokens: 95% prompt, 5% completion. Results: OUT/branch_parallel.jsonl as they come, OUT/branch_parallel.md at the end.
What cannot run here is said and skipped. With one GPU both workers of Branch-Parallel share it in the sections parity
and cap: that shows what they compute and what each takes of memory, not how fast two GPUs would be.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.measured import Measured, say  # noqa: E402
from benchmarks.random_weights import SHAPES, built_model, configuration, write_random_pairs  # noqa: E402
from traceforge_core.errors import TraceForgeError  # noqa: E402
from traceforge_core.training import stages  # noqa: E402
from traceforge_core.training.job import Job  # noqa: E402
from traceforge_core.training.records import read_records  # noqa: E402
from traceforge_core.training.seats import visible_gpus  # noqa: E402

SECTIONS = ("parity32", "parity16", "speed", "cap")
PAIRS = 6
# Trainers that only a benchmark needs live in benchmarks/branch_trainers.py.
SWAPPED = "benchmarks.branch_trainers:SwappedOracle"
BOTH = "benchmarks.branch_trainers:BothBranches"
CAPPED = "benchmarks.branch_trainers:CappedBranchParallel"


def main() -> None:
    options = parse_arguments()
    bench = Bench(options)
    for section in options.sections:
        clock = time.monotonic()
        getattr(bench, section)()
        say(f"{section} took {time.monotonic() - clock:.0f} s")
    tables = bench.measured.markdown()
    (options.out / "branch_parallel.md").write_text(tables, encoding="utf-8")
    print(tables)


def parse_arguments() -> argparse.Namespace:
    def listed(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", type=listed, default=list(SECTIONS))
    parser.add_argument("--lengths", type=listed, help="tokens a branch; default: each section's own")
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b", help="model of parity16, speed and cap")
    parser.add_argument("--small", choices=SHAPES, help="model of parity32; default: small, or tiny with --model tiny")
    parser.add_argument("--backends", type=listed, default=["transformers", "unsloth"])
    parser.add_argument("--rows", default="", help="of the section speed: only rows whose name has this in it")
    parser.add_argument("--transports", type=listed, default=["nccl", "gloo"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of a measurement, warm-up included")
    parser.add_argument("--cap", type=float, default=24.0, help="GiB a GPU in the section cap")
    parser.add_argument("--long-context", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/traceforge-benchmark"), help="models and runs")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "results")))
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown sections: {', '.join(sorted(unknown))} (there are {', '.join(SECTIONS)})")
    return options


class Bench:
    """The measurements, and what they found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.gpus = visible_gpus() if options.device == "cuda" else []
        self.measured = Measured(options.out / "branch_parallel.jsonl", key=("section", "name", "length"))
        self.runs = 0
        self.one_gpu = len(self.gpus) == 1
        if options.device == "cuda":
            say(f"{len(self.gpus)} GPUs can be used")

    # ---- sections ----

    def parity32(self) -> None:
        model = self.options.small or ("tiny" if self.options.model == "tiny" else "small")
        for length in self.lengths(2048, 8192, 16_384):
            self.compare("parity32", model, length, model__dtype="float32", model__quantization="none")

    def parity16(self) -> None:
        nf4 = "nf4" if self.options.device == "cuda" else "none"
        for length in self.lengths(2048, 8192, 16_384):
            self.compare("parity16", self.options.model, length, model__dtype="bfloat16", model__quantization=nf4)

    def speed(self) -> None:
        for length in self.lengths(8192, 32_768, 81_920):
            for name, job in self.speed_jobs(length):
                if self.options.rows not in name:
                    continue
                self.measure("speed", name, length, job)

    def cap(self) -> None:
        length = max(self.lengths(81_920))
        os.environ["BENCHMARK_CAP_GIB"] = str(self.options.cap)
        with self.monitored():
            for backend in self.backends():
                job = self.job("branch_parallel", self.options.model, length, model__backend=backend)
                share = "worker, both on one GPU" if self.one_gpu else "GPU"
                name = f"branch_parallel, {backend}, {self.options.cap:g} GiB a {share}"
                self.measure("cap", name, length, changed(job, trainer=CAPPED))

    def speed_jobs(self, length: int) -> Iterator[tuple[str, Callable[[], Job]]]:
        model = self.options.model
        yield "oracle (TRL)", self.job("oracle", model, length)
        for backend in self.backends():
            both = changed(self.job("oracle", model, length), trainer=BOTH, backend=backend)
            yield f"one worker, both branches in turn, {backend}", both
            for transport in self.transports():
                yield (
                    f"branch_parallel, {backend}, {transport}",
                    self.job("branch_parallel", model, length, model__backend=backend, preference__transport=transport),
                )

    # ---- one measurement ----

    def job(self, kind: Any, model: str, length: int, **changes: Any) -> Callable[[], Job]:
        """Makes the job when called, so that what cannot be made is caught where measurements are."""

        def make() -> Job:
            self.runs += 1
            inputs = {
                "model": self.model(model),
                "datasets": write_random_pairs(
                    self.options.work / f"pairs-{model}-{length}", SHAPES[model], length, PAIRS
                ),
                "sft": self.model(model),
            }
            out = self.options.work / "runs" / f"{self.runs:03d}-{kind}"
            shutil.rmtree(out, ignore_errors=True)
            own = {"preference__long_context": self.options.long_context} | changes
            if self.one_gpu and changes.get("preference__transport") is None:
                own["preference__share_gpu"] = True
            config = configuration(model, self.options.device, length, self.options.steps, **own)
            return stages.preference_job(kind, config, inputs, out)

        return make

    def measure(self, section: str, name: str, length: int, make: Callable[[], Job]) -> None:
        """Train, and record seconds (median of the steps after the first) and peak memory."""
        with self.measured.reported(section=section, name=name, length=length) as record:
            job = make()
            stages.run_job(job, on_line=quiet)
            steps = read_records(job.out_dir / "metrics.jsonl")
            seconds = median(step.seconds or 0.0 for step in steps[1:])
            exchange = median(step.exchange_seconds for step in steps[1:])
            record(
                seconds=seconds,
                exchange_seconds=exchange,
                exchange_share=exchange / seconds,
                peak_gib=max(step.peak_memory_mib or 0.0 for step in steps) / 1024,
                steps=len(steps),
            )
            shutil.rmtree(job.out_dir, ignore_errors=True)

    def compare(self, section: str, model: str, length: int, **changes: Any) -> None:
        """Against the oracle, over a few steps: the oracle with its branches swapped, and one worker computing the
        branches in turn (both show what rounding alone does), and Branch-Parallel."""
        from traceforge_core.comparison.parity import measure

        changes |= {"comparison__gradient_steps": self.options.steps}
        oracle: Path | None = None
        reference = self.job("oracle", model, length, **changes)
        candidates = {
            "oracle": reference,
            "oracle, branches swapped": changed(reference, trainer=SWAPPED),
            "one worker, both branches in turn": changed(reference, trainer=BOTH),
            "branch_parallel": self.job("branch_parallel", model, length, **changes),
        }
        for name, make in candidates.items():
            with self.measured.reported(section=section, name=name, length=length) as record:
                job = make()
                stages.run_job(job, on_line=quiet)
                if name == "oracle":
                    oracle = job.out_dir
                    continue
                if oracle is None:
                    raise TraceForgeError("the oracle is missing, so there is nothing to compare with")
                parity = measure(oracle, job.out_dir)
                first = parity.steps[0]
                record(
                    first_loss_difference=first.loss,
                    max_loss_difference=parity.max_loss,
                    first_gradient_difference=first.gradient_overall,
                    max_gradient_difference=parity.max_gradient,
                    adapter_difference=parity.adapter,
                    steps=len(parity.steps),
                )

    # ---- surroundings ----

    def lengths(self, *own: int) -> list[int]:
        return [int(length) for length in self.options.lengths] if self.options.lengths else list(own)

    def backends(self) -> list[str]:
        return self.options.backends if self.options.device == "cuda" else ["transformers"]

    def transports(self) -> list[str]:
        return self.options.transports if self.options.device == "cuda" else ["gloo"]

    def model(self, name: str) -> Path:
        return built_model(name, self.options.work / name, self.options.device)

    @contextlib.contextmanager
    def monitored(self) -> Iterator[None]:
        """The GPU monitor beside the measurements; its CSV and plot lie in OUT/monitoring."""
        from traceforge_core.monitoring import gpu
        from traceforge_core.monitoring.plots import draw_plots

        folder, stop = self.options.out / "monitoring", threading.Event()
        folder.mkdir(exist_ok=True)
        watcher = threading.Thread(target=gpu.watch, args=(folder, 2.0, stop, os.getpid()), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            stop.set()
            watcher.join(10)
            draw_plots(folder)


def changed(make: Callable[[], Job], **fields: Any) -> Callable[[], Job]:
    return lambda: dataclasses.replace(make(), **fields)


def quiet(rank: int, line: str) -> None:
    """Workers' output stays in their logs."""


if __name__ == "__main__":
    main()
