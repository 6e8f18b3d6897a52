"""The whole flow on a GPU: every stage with a preset's own precision, optimizer and backends, in the time of a demo.

    python benchmarks/whole_flow.py --out results                       # Qwen3-8B in NF4, both backends, one GPU or two
    python benchmarks/whole_flow.py --model small --device cpu --backends transformers      # no GPU: 7 minutes

The model has random weights of Qwen3-8B's shape and the tokenizer of the embedded model, so nothing is downloaded; it
is named by its folder, as a user would name it. The flow is `traceforge run` with the preset of two 24 GB cards on the
shipped samples, with few steps. Where there is one GPU, both workers of Branch-Parallel share it. Printed at the end: a
table of stages and figures a backend. OUT keeps each comparison's report and the GPU monitor's CSV and plot.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.random_weights import built_model  # noqa: E402
from traceforge_core.training.seats import visible_gpus  # noqa: E402

PRESET = "qwen3-8b-24gb"
FIGURES = ("backend", "steps", "first_loss", "last_loss", "seconds_per_step", "peak_memory_mib", "transport", "verdict")
KEPT = ("compare/report.md", "compare/report.html", "monitoring/nvidia_smi_monitor.csv", "monitoring/*.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("qwen3-8b", "small"), default="qwen3-8b", help="shape (default: qwen3-8b)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backends", type=lambda text: text.split(","), default=["transformers", "unsloth"])
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of SFT and of a strategy (default: 4)")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/traceforge-benchmark"), help="model and runs")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "results")))
    options = parser.parse_args()
    model = model_with_tokenizer(options)
    failed = 0
    for backend in options.backends:
        clock = time.monotonic()
        told = run_flow(options, model, backend)
        if told is None:
            failed += 1
            continue
        print(table(backend, told, time.monotonic() - clock), flush=True)
        keep(Path(told["path"]), options.out, backend)
        failed += told["parity"]["verdict"] != "pass"
    return 1 if failed else 0


def model_with_tokenizer(options: argparse.Namespace) -> Path:
    """A model folder as people have one: the weights of the shape, and a tokenizer that can write."""
    from traceforge_core.modeling.tiny import tiny_tokenizer

    weights = built_model(options.model, options.work / options.model, options.device) / "weights"
    folder: Path = options.work / f"{options.model}-with-tokenizer"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    for file in weights.iterdir():
        if file.suffix == ".safetensors" or file.name.endswith(".index.json"):
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((weights / "config.json").read_text(encoding="utf-8"))
    config |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def run_flow(options: argparse.Namespace, model: Path, backend: str) -> dict[str, Any] | None:
    """`traceforge run` in a process of its own; what --json says, also where the verdict is no pass (exit status 2).
    None where it came to no verdict; it has said why."""
    nf4 = options.device == "cuda" and options.model == "qwen3-8b"
    settings: dict[str, Any] = {
        "model.name": model,
        "model.device": options.device,
        "model.backend": backend,
        "model.quantization": "nf4" if nf4 else "none",
        "datasets.sft.max_length": 2048,
        "datasets.sft.max_samples": 8 * options.steps,
        "sft.max_steps": options.steps,
        "preference.max_steps": options.steps,
        "preference.learning_rate": 1e-4,
        "preference.warmup_steps": 0,
        "preference.share_gpu": len(visible_gpus()) < 2,
        "comparison.oracle_steps": options.steps,
        "comparison.gradient_steps": min(2, options.steps),
        "comparison.noise_runs": 4,
        "comparison.noise_steps": options.steps,
        "evaluation.max_actions": 16,
    }
    if options.device == "cpu":
        settings |= {"sft.optimizer": "adamw_torch", "preference.optimizer": "adamw_torch"}
    runs = options.work / "runs" / f"whole-{backend}"
    shutil.rmtree(runs, ignore_errors=True)
    command = [sys.executable, "-m", "flows.cli", "run", "--preset", PRESET, "--runs-dir", str(runs), "--json"]
    command += [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    told: dict[str, Any] = json.loads(done.stdout or "{}")
    if not told.get("parity"):
        print(f"{backend}: traceforge run ended with {done.returncode}: {done.stdout[-2000:]}", flush=True)
        return None
    return told


def table(backend: str, told: dict[str, Any], seconds: float) -> str:
    lines = [f"## {backend}: {seconds:.0f} s, verdict {told['parity']['verdict']}", ""]
    lines += ["| stage | status | seconds | figures |", "| --- | --- | --- | --- |"]
    for stage in told["stages"]:
        figures = stage.get("figures") or {}
        shown = ", ".join(f"{name} {show(figures[name])}" for name in FIGURES if name in figures)
        lines.append(f"| {stage['stage']} | {stage['status']} | {show(stage.get('seconds') or 0.0)} | {shown} |")
    return "\n".join([*lines, "", json.dumps(told["parity"]), ""])


def keep(run: Path, out: Path, backend: str) -> None:
    folder = out / f"whole_flow_{backend}"
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in KEPT:
        for file in run.glob(pattern):
            shutil.copy(file, folder / file.name)


def show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
