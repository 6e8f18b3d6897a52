"""Does the comparison find what is wrong, and only that? Every fault planted, clean runs, and the smallest error seen.

    python benchmarks/regression.py                                    # tiny preset on the samples, float32, CPU
    python benchmarks/regression.py --dtype bfloat16 --power           # against the oracle's own noise
    python benchmarks/regression.py --seeds 20                         # also: clean runs, which must raise no alarm
    python benchmarks/regression.py --model ~/models/SmolLM2-135M      # any model folder, on the samples
    python benchmarks/regression.py --model qwen3-8b --length 2048     # one GPU: random weights built on the spot, NF4

Prints Markdown: for each strategy the faults and what the report pointed at, then the noise floor (bfloat16), then with
--power how large an error must be to be seen. Both workers of Branch-Parallel share one GPU where there is only one.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.random_weights import SHAPES, built_model, write_pairs  # noqa: E402
from traceforge_core.comparison.detection import CLEAN, Detection  # noqa: E402
from traceforge_core.comparison.faults.registry import FAULTS, GRADED  # noqa: E402
from traceforge_core.comparison.noise_floor import Floor, summary  # noqa: E402
from traceforge_core.comparison.rehearsal import clean_runs, rehearse  # noqa: E402
from traceforge_core.config import RunConfig, load_config  # noqa: E402
from traceforge_core.errors import TraceForgeError  # noqa: E402
from traceforge_core.runs import Run, installed_versions, write_json  # noqa: E402
from traceforge_core.stages import perform  # noqa: E402
from traceforge_core.training.job import STRATEGIES  # noqa: E402
from traceforge_core.training.seats import visible_gpus  # noqa: E402

BUILT = tuple(SHAPES)
AMOUNTS = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0001, 0.00001)


def main() -> None:
    options = parse_arguments()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("traceforge_core.comparison").setLevel(logging.INFO)
    clock = time.monotonic()
    config = configuration(options)
    inputs = random_inputs(options) if options.model in BUILT else sample_inputs(options, config)
    note = f"{options.model}, {config.model.dtype}, {config.model.quantization}, {config.preference.max_steps} steps"
    print(f"# Planted faults: {note}\n", flush=True)
    told: dict[str, Any] = {"setting": setting(options, config), "versions": installed_versions(), "strategies": {}}
    share = options.device == "cuda" and len(visible_gpus()) < 2
    runs = options.work / "runs" / note.replace("/", "_")
    shutil.rmtree(runs, ignore_errors=True)  # trainings of an earlier call would be gone on with, whatever made them
    for strategy in options.strategies:
        graded = [f"{kind}:{amount:g}" for kind in options.power for amount in AMOUNTS]
        wanted = [f.name for f in FAULTS.values() if strategy in f.strategies and applies(f.needs, config)] + graded
        found = rehearse(config, inputs, runs, strategy, wanted, share)
        planted = [one for one in found.detections if ":" not in one.fault]
        print_faults(strategy, planted)
        print_floor(found.floor)
        rows = {"faults": [one.as_dict() for one in planted], "floor": summary(found.floor) if found.floor.runs else {}}
        if graded:
            sizes = [one for one in found.detections if ":" in one.fault]
            print_power(strategy, sizes)
            rows["power"] = [one.as_dict() for one in sizes]
        told["strategies"][strategy] = rows
        write(told, options.out)
    if options.seeds:
        folder = options.work / "runs" / "clean" / note.replace("/", "_")
        shutil.rmtree(folder, ignore_errors=True)
        for strategy, clean in clean_runs(config, inputs, folder, options.strategies, range(options.seeds)).items():
            alarms = [f"seed {seed}: {one.reason}" for seed, one in enumerate(clean) if not one.right]
            print(f"{strategy}, clean runs with other orders of the data: {len(clean)}, alarms: {len(alarms)}.")
            print("".join(f"- {alarm}\n" for alarm in alarms), flush=True)
            told["strategies"][strategy]["clean"] = {"runs": len(clean), "alarms": alarms}
        write(told, options.out)
    print(f"Took {time.monotonic() - clock:.0f} s.")


def setting(options: argparse.Namespace, config: RunConfig) -> dict[str, Any]:
    """What was compared, for whoever reads the result."""
    return {
        "model": options.model if options.model in ("preset", *BUILT) else Path(options.model).name,
        "device": options.device,
        "dtype": config.model.dtype,
        "quantization": config.model.quantization,
        "steps": config.preference.max_steps,
        "longest_branch": options.length if options.model in BUILT else config.comparison.oracle_max_length,
        "noise_runs": config.comparison.noise_runs if config.model.dtype != "float32" else 0,
        "confidence": config.comparison.confidence,
    }


def write(told: dict[str, Any], out: Path | None) -> None:
    """One file a model and precision, after every strategy."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / f"regression-{told['setting']['model']}-{told['setting']['dtype']}.json", told)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preset", help="preset (tiny-cpu's), a model folder, or " + ", ".join(BUILT))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on the CPU, else bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument("--length", type=int, default=2048, help="tokens a branch of the random pairs of a built model")
    parser.add_argument("--cut-to", type=int, help="longest branch of other pairs; default: whole pairs")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps a run; some faults need three to show")
    parser.add_argument("--accumulation", type=int, help="pairs a step and worker; default: the preset's")
    parser.add_argument("--noise-runs", type=int, default=8, help="bfloat16: runs of the oracle against itself")
    parser.add_argument("--seeds", type=int, default=0, help="clean runs, each with another order of the data")
    parser.add_argument(
        "--power", nargs="*", choices=GRADED, help="also: errors of falling size, of these kinds (none named: of all)"
    )
    parser.add_argument("--strategies", type=lambda text: text.split(","), help="default: all there are")
    parser.add_argument("--out", type=Path, help="folder for the same as JSON (see detection_page.py)")
    parser.add_argument("--work", type=Path, default=Path("/tmp/traceforge-regression"), help="models and runs")
    options = parser.parse_args()
    options.device = options.device or ("cuda" if visible_gpus() and options.model != "preset" else "cpu")
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    options.strategies = options.strategies or list(STRATEGIES)
    options.power = list(GRADED) if options.power == [] else options.power or []
    return options


def configuration(options: argparse.Namespace) -> RunConfig:
    """The tiny preset, with the model and precision asked for."""
    nf4 = options.device == "cuda" and options.dtype == "bfloat16" and options.model != "preset"
    built = options.model in BUILT
    changes: dict[str, Any] = {
        "model.device": options.device,
        "model.dtype": options.dtype,
        "model.quantization": "nf4" if nf4 else "none",
        "preference.max_steps": options.steps,
        "preference.gradient_checkpointing": options.model not in ("preset", "tiny"),
        "comparison.gradient_steps": 1 if nf4 else options.steps,
        "comparison.noise_runs": options.noise_runs,
        "comparison.noise_steps": options.steps,
    }
    if options.cut_to:
        changes |= {"comparison.oracle_max_length": options.cut_to, "comparison.oracle_steps": options.steps}
    if options.model != "preset" and not built:
        changes |= {"model.name": str(Path(options.model).expanduser().resolve()), "preference.learning_rate": 1e-4}
        # The adapter that preference training starts from: little of it, and from short samples.
        changes |= {"sft.learning_rate": 1e-4, "sft.max_steps": 4, "datasets.sft.max_length": 2048}
        changes |= {"datasets.sft.max_samples": 8, "model.chat_template": "chatml"}
        changes["preference.max_grad_norm"] = 0.1  # gradients are longer: clipping too early shows only where one clips
    if options.accumulation:
        changes["preference.gradient_accumulation"] = options.accumulation
    if built:
        # Random weights give gradients of any size: clip all of them, so that clipping too early shows.
        changes |= {"preference.gradient_accumulation": 1, "preference.max_grad_norm": 1e-3}
        changes |= {"preference.learning_rate": 1e-4, "preference.schedule": "linear"}
    return load_config(assignments=[f"{name}={value}" for name, value in changes.items()])


def applies(needs: str | None, config: RunConfig) -> bool:
    """Whether a fault would change anything with these settings."""
    return needs != "accumulation" or config.preference.gradient_accumulation * config.preference.batch_size > 1


def sample_inputs(options: argparse.Namespace, config: RunConfig) -> dict[str, Path]:
    """The first stages of a run on the shipped samples."""
    runs = options.work / "samples"
    runs.mkdir(parents=True, exist_ok=True)
    run = Run.create(runs)
    stages = ("ingest", "model", "datasets", "sft")
    return {name: perform(name, config, run).path for name in stages}


def random_inputs(options: argparse.Namespace) -> dict[str, Path]:
    """A model of random weights, an adapter, and pairs of random tokens: nine parts prompt, one part completion of
    unequal length, with what stands for an observation in the middle."""
    import numpy as np

    folder = built_model(options.model, options.work / options.model, options.device)
    draw = np.random.default_rng(options.length)
    vocabulary, completion = SHAPES[options.model]["vocab_size"], options.length // 10
    rows = []
    for index in range(8):
        row: dict[str, Any] = {"pair_id": f"random-{index}"}
        row["prompt_ids"] = draw.integers(10, vocabulary, options.length - completion).tolist()
        for branch in ("chosen", "rejected"):
            count = int(draw.integers(completion // 2, completion + 1))
            row[f"{branch}_ids"] = draw.integers(10, vocabulary, count).tolist()
            row[f"{branch}_mask"] = [int(not count // 3 <= place < count // 2) for place in range(count)]
        rows.append(row)
    datasets = options.work / f"pairs-{options.model}-{options.length}"
    write_pairs(datasets, rows)
    return {"model": folder, "datasets": datasets, "sft": folder}


def print_faults(strategy: str, found: Sequence[Detection]) -> None:
    clean = [one for one in found if one.fault == CLEAN]
    planted = [one for one in found if one.fault != CLEAN]
    caught, right = sum(one.caught for one in planted), sum(one.right for one in planted)
    print(f"## {strategy}: {caught} of {len(planted)} caught, {right} pointed at rightly\n")
    print("| fault | what is wrong | verdict | points at | at step | × its limit | by | also left |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for one in (*clean, *planted):
        what = FAULTS[one.fault].what.split("\n")[0] if one.fault in FAULTS else "nothing"
        said = one.decisive
        pointed = said.pointed_at or ("the workers' own check" if said.outcome == "stopped" else "-")
        pointed += "" if one.right else " (!)"
        over = f"{said.statistic:.3g}" if said.outcome == "fail" else "-"
        by = "float32 beside it" if said is not one else "itself"
        rest = ", ".join(said.left[1:]) or "-"
        print(f"| `{one.fault}` | {what} | {said.outcome} | {pointed} | {said.step or '-'} | {over} | {by} | {rest} |")
    print(flush=True)


def print_floor(floor: Floor) -> None:
    if not floor.runs:
        return
    print(f"Noise floor, {len(floor.runs)} runs of the oracle against itself, {floor.runs[0].steps} steps (RMS):\n")
    print("| quantity | noise |\n| --- | --- |")
    for name, value in summary(floor).items():
        print(f"| {name.replace('_', ' ')} | {value:.3g} |")
    print(flush=True)


def print_power(strategy: str, found: Sequence[Detection]) -> None:
    print(f"## {strategy}: smallest error seen\n\n| error | smallest caught | largest missed |\n| --- | --- | --- |")
    for kind, make in GRADED.items():
        sizes = {float(one.fault.partition(":")[2]): one for one in found if one.fault.startswith(f"{kind}:")}
        if not sizes:
            continue
        cells = power(sizes)
        what = (make.__doc__ or kind).split(":")[0].split("\n")[0]
        print(f"| `{kind}`: {what} | {' | '.join('-' if cell is None else f'{cell:g}' for cell in cells)} |")
    print(flush=True)


def power(sizes: Mapping[float, Detection]) -> tuple[float | None, float | None]:
    """The smallest error caught together with everything larger, and the largest missed."""
    missed = max((size for size, one in sizes.items() if one.outcome == "pass"), default=None)
    caught = [size for size, one in sizes.items() if one.outcome != "pass" and (missed is None or size > missed)]
    return min(caught, default=None), missed


if __name__ == "__main__":
    try:
        main()
    except TraceForgeError as error:
        sys.exit(str(error))
