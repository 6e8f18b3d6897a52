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
What cannot run here is said and skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from traceforge_core.config import RunConfig, load_config  # noqa: E402
from traceforge_core.errors import TraceForgeError  # noqa: E402
from traceforge_core.training import stages  # noqa: E402
from traceforge_core.training.job import Job  # noqa: E402
from traceforge_core.training.launch import visible_gpus  # noqa: E402
from traceforge_core.training.records import read_records  # noqa: E402

SECTIONS = ("parity32", "parity16", "speed", "cap")
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "small": {
        "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2,
    },
    "tiny": {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
PAIRS = 6
# Trainers that only a benchmark needs live in benchmarks/branch_trainers.py.
SWAPPED = "benchmarks.branch_trainers:SwappedOracle"
BOTH = "benchmarks.branch_trainers:BothBranches"
CAPPED = "benchmarks.branch_trainers:CappedBranchParallel"


def main() -> None:
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    for section in options.sections:
        clock = time.monotonic()
        getattr(bench, section)()
        bench.say(f"{section} took {time.monotonic() - clock:.0f} s")
    bench.write_tables()


def parse_arguments() -> argparse.Namespace:
    def listed(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", type=listed, default=list(SECTIONS))
    parser.add_argument("--lengths", type=listed, help="tokens a branch; default: each section's own")
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b", help="model of parity16, speed and cap")
    parser.add_argument("--small", choices=SHAPES, help="model of parity32; default: small, or tiny with --model tiny")
    parser.add_argument("--backends", type=listed, default=["transformers", "unsloth"])
    parser.add_argument("--transports", type=listed, default=["nccl", "gloo"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of a measurement, warm-up included")
    parser.add_argument("--cap", type=float, default=24.0, help="GiB a GPU in the section cap")
    parser.add_argument("--long-context", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/traceforge-benchmark"), help="models and runs")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "results")))
    parser.add_argument("--build", choices=SHAPES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        build_model(options.build, options.work / options.build, options.device)
        sys.exit()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown sections: {', '.join(sorted(unknown))} (there are {', '.join(SECTIONS)})")
    return options


class Bench:
    """The measurements, and what they found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.gpus = visible_gpus() if options.device == "cuda" else []
        self.rows: dict[str, list[dict[str, Any]]] = {section: [] for section in SECTIONS}
        self.runs = 0
        if options.device == "cuda":
            self.say(f"{len(self.gpus)} GPUs can be used")

    # ---- sections ----

    def parity32(self) -> None:
        model = self.options.small or ("tiny" if self.options.model == "tiny" else "small")
        for length in self.lengths(2048, 8192, 16_384):
            self.compare("parity32", model, length, dtype="float32", quantization="none")

    def parity16(self) -> None:
        nf4 = "nf4" if self.options.device == "cuda" else "none"
        for length in self.lengths(2048, 8192, 16_384):
            self.compare("parity16", self.options.model, length, dtype="bfloat16", quantization=nf4)

    def speed(self) -> None:
        for length in self.lengths(8192, 32_768, 81_920):
            for name, job in self.speed_jobs(length):
                self.measure("speed", name, length, job)

    def cap(self) -> None:
        length = max(self.lengths(81_920))
        os.environ["BENCHMARK_CAP_GIB"] = str(self.options.cap)
        with self.monitored():
            for backend in self.backends():
                job = self.job("branch_parallel", self.options.model, length, backend=backend, steps=self.options.steps)
                name = f"branch_parallel, {backend}, {self.options.cap:g} GiB a GPU"
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
                    self.job("branch_parallel", model, length, backend=backend, transport=transport),
                )

    # ---- one measurement ----

    def job(self, kind: Any, model: str, length: int, **changes: Any) -> Callable[[], Job]:
        """Makes the job when called, so that what cannot be made is caught where measurements are."""

        def make() -> Job:
            self.runs += 1
            inputs = {
                "model": self.model(model),
                "datasets": random_pairs(self.options.work / f"pairs-{model}-{length}", SHAPES[model], length),
                "sft": self.model(model),
            }
            out = self.options.work / "runs" / f"{self.runs:03d}-{kind}"
            shutil.rmtree(out, ignore_errors=True)
            return stages.preference_job(kind, self.config(model, length, **changes), inputs, out)

        return make

    def config(self, model: str, length: int, **changes: Any) -> RunConfig:
        on_gpu = self.options.device == "cuda"
        big = model == "qwen3-8b"
        values = {
            "model.device": self.options.device,
            "model.dtype": changes.get("dtype", "bfloat16" if big else "float32"),
            "model.quantization": changes.get("quantization", "nf4" if big and on_gpu else "none"),
            "model.backend": changes.get("backend", "transformers"),
            "datasets.preference.max_length": length,
            "preference.max_steps": changes.get("steps", self.options.steps),
            "preference.schedule": "constant",
            "preference.learning_rate": 1e-5,
            "preference.transport": changes.get("transport", "auto"),
            "preference.long_context": self.options.long_context,
            "preference.checkpoint_steps": 1000,
            "preference.gradient_checkpointing": big or length > 4096,
            "comparison.gradient_steps": changes.get("gradient_steps", 0),
        }
        return load_config(assignments=[f"{name}={json.dumps(value)}" for name, value in values.items()])

    def measure(self, section: str, name: str, length: int, make: Callable[[], Job]) -> None:
        """Train, and record seconds (median of the steps after the first) and peak memory."""
        with self.reported(section, name, length):
            job = make()
            stages.run_job(job, on_line=quiet)
            records = read_records(job.out_dir / "metrics.jsonl")
            steps = sorted(record.seconds or 0.0 for record in records[1:])
            seconds = steps[len(steps) // 2]
            exchange = sorted(record.exchange_seconds for record in records[1:])[len(steps) // 2]
            self.record(
                section,
                name,
                length,
                seconds=seconds,
                exchange_seconds=exchange,
                exchange_share=exchange / seconds,
                peak_gib=max(record.peak_memory_mib or 0.0 for record in records) / 1024,
                steps=len(records),
            )
            shutil.rmtree(job.out_dir, ignore_errors=True)

    def compare(self, section: str, model: str, length: int, **changes: Any) -> None:
        """Against the oracle, over a few steps: the oracle with its branches swapped, and one worker computing the
        branches in turn (both show what rounding alone does), and Branch-Parallel."""
        from traceforge_core.comparison.parity import measure

        changes |= {"gradient_steps": self.options.steps}
        oracle: Path | None = None
        reference = self.job("oracle", model, length, **changes)
        candidates = {
            "oracle": reference,
            "oracle, branches swapped": changed(reference, trainer=SWAPPED),
            "one worker, both branches in turn": changed(reference, trainer=BOTH),
            "branch_parallel": self.job("branch_parallel", model, length, **changes),
        }
        for name, make in candidates.items():
            with self.reported(section, name, length):
                job = make()
                stages.run_job(job, on_line=quiet)
                if name == "oracle":
                    oracle = job.out_dir
                    continue
                if oracle is None:
                    raise TraceForgeError("the oracle is missing, so there is nothing to compare with")
                parity = measure(oracle, job.out_dir)
                first = parity.steps[0]
                self.record(
                    section,
                    name,
                    length,
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
        """What the model and SFT stages would leave behind, built once, in a process that gives its GPU memory back."""
        folder = self.options.work / name
        if not (folder / "model.json").exists():
            self.say(f"building {name} with random weights")
            arguments = ["--build", name, "--work", str(self.options.work), "--device", self.options.device]
            subprocess.run([sys.executable, __file__, *arguments], check=True)
        return folder

    @contextlib.contextmanager
    def reported(self, section: str, name: str, length: int) -> Iterator[None]:
        """What fails is a row too: out of memory, too few GPUs, a library that is not installed."""
        try:
            yield
        except TraceForgeError as error:
            self.record(section, name, length, cannot=str(error).splitlines()[0])

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

    def record(self, section: str, name: str, length: int, **figures: Any) -> None:
        row = {"section": section, "name": name, "length": length} | figures
        self.rows[section].append(row)
        with (self.options.out / "branch_parallel.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.say(f"{section}, {length:,}: {name}: {', '.join(f'{key} {show(v)}' for key, v in figures.items())}")

    def say(self, text: str) -> None:
        print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)

    def write_tables(self) -> None:
        lines = []
        for section, rows in self.rows.items():
            if not rows:
                continue
            columns = list(dict.fromkeys(key for row in rows for key in row if key != "section"))
            lines += [f"## {section}", "", f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
            lines += [f"| {' | '.join(show(row.get(column, '-')) for column in columns)} |" for row in rows]
            lines.append("")
        (self.options.out / "branch_parallel.md").write_text("\n".join(lines), encoding="utf-8")
        print("\n".join(lines))


def changed(make: Callable[[], Job], **fields: Any) -> Callable[[], Job]:
    return lambda: dataclasses.replace(make(), **fields)


def quiet(rank: int, line: str) -> None:
    """Workers' output stays in their logs."""


def show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def random_pairs(folder: Path, shape: dict[str, Any], length: int) -> Path:
    """A datasets stage of random pairs: 95% of `length` is the prompt, and both completions fill the rest."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / "preference" / "train.parquet"
    if path.exists():
        return folder
    draw = np.random.default_rng(length)
    completion = max(1, length // 20)
    rows = []
    for index in range(PAIRS):
        parts = {"prompt": length - completion, "chosen": completion, "rejected": completion}
        row: dict[str, Any] = {"pair_id": f"random-{index}"}
        row |= {
            f"{part}_ids": draw.integers(10, shape["vocab_size"] - 10, count).tolist() for part, count in parts.items()
        }
        row |= {f"{branch}_mask": [1] * completion for branch in ("chosen", "rejected")}
        rows.append(row)
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return folder


def build_model(name: str, folder: Path, device: str) -> None:
    """Random weights of a shape (Qwen3-8B: NF4 with double quantisation on a GPU), a tokenizer that is never used, and
    an adapter whose B is not zero, so that every gradient has a size."""
    import torch
    from peft import get_peft_model
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedTokenizerFast, Qwen3Config

    from traceforge_core.config import ModelConfig
    from traceforge_core.modeling.adapters import save_adapter
    from traceforge_core.modeling.loading import draw_adapter, lora_config

    shutil.rmtree(folder, ignore_errors=True)
    big = name == "qwen3-8b"
    size = SHAPES[name]
    config = Qwen3Config(
        **size,
        head_dim=size["hidden_size"] // size["num_attention_heads"],
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if big else torch.float32)
    if big and device == "cuda":
        model.save_pretrained(folder / "bf16", max_shard_size="4GB")
        del model
        torch.cuda.empty_cache()
        nf4 = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        model = AutoModelForCausalLM.from_pretrained(
            folder / "bf16", dtype=torch.bfloat16, quantization_config=nf4, device_map={"": 0}
        )
        shutil.rmtree(folder / "bf16")
    model.save_pretrained(folder / "weights")
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "w": 2}, unk_token="w"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    for place in ("tokenizer", "weights"):  # Unsloth looks beside the weights
        tokenizer.save_pretrained(folder / place)
    adapted = get_peft_model(model, lora_config(ModelConfig()))
    draw_adapter(adapted, 0)
    for parameter_name, parameter in sorted(adapted.named_parameters()):
        if ".lora_B." in parameter_name:
            parameter.data.normal_(0, 0.01)
    save_adapter(adapted, folder / "adapter")
    (folder / "model.json").write_text(json.dumps({"name": name, "weights": "weights", "revision": None}))


if __name__ == "__main__":
    main()
