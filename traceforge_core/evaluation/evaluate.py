"""The stage `evaluate`, and the same for any adapter on any held-out data.

    figures = evaluate(config, {"model": ..., "datasets": ..., "sft": ..., "oracle": ...}, out_dir)
    evaluate_adapters(config, model_dir, datasets_dir, {"mine": Path("adapter")}, out_dir)

Leaves evaluation.json (figures), scores.jsonl (one line a model and row), evaluation.md and evaluation.png. Models live
in a worker process; nothing here imports torch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.evaluation import rows
from traceforge_core.evaluation.report import draw, render
from traceforge_core.evaluation.worker import BASE, REQUEST, Request
from traceforge_core.paths import written
from traceforge_core.runs import write_json
from traceforge_core.training.job import TRAINING, Job
from traceforge_core.training.launch import OnLine, launch
from traceforge_core.training.seats import seats
from traceforge_core.training.stages import resolve_device

logger = logging.getLogger(__name__)


def evaluate(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> dict[str, Any]:
    """Base model, and the adapter of every training stage that is there, on the run's held-out data.

    Where nothing is held out the figures are a `note` that says so, and the pipeline goes on.
    """
    reason = nothing_held_out(config, inputs["datasets"])
    if reason is not None:
        logger.warning("Nothing is evaluated: %s", reason)
        write_json(out_dir / "evaluation.json", {"models": {}, "note": reason})
        (out_dir / "evaluation.md").write_text(f"# Evaluation\n\nNothing was evaluated: {reason}\n", encoding="utf-8")
        return {"pairs": 0, "actions": 0, "note": reason}
    adapters = {name: inputs[name] / "adapter" for name in TRAINING if name in inputs}
    return evaluate_adapters(config, inputs["model"], inputs["datasets"], adapters, out_dir)


def evaluate_adapters(
    config: RunConfig,
    model_dir: Path,
    datasets: Path,
    adapters: Mapping[str, Path],
    out_dir: Path,
    on_line: OnLine | None = None,
) -> dict[str, Any]:
    """Measure the base model and each adapter (by name) on held-out data; write the report; return the figures.

    model_dir: a finished model stage. datasets: a finished datasets stage (either of its two held-out files will do).
    Raises TraceForgeError where nothing is held out, or an adapter is not there or does not fit.
    """
    if (reason := nothing_held_out(config, datasets)) is not None:
        raise TraceForgeError(f"There is nothing to evaluate on: {reason}")
    run_worker(config, model_dir, datasets, Request("measure", check_adapters(adapters)), out_dir, on_line)
    measured = json.loads((out_dir / "measured.json").read_text(encoding="utf-8"))
    for passing in ("measured.json", REQUEST):
        (out_dir / passing).unlink()
    with (out_dir / "scores.jsonl").open("w", encoding="utf-8") as file:
        for name, answer in measured.items():
            for kind, scores in answer["rows"].items():
                file.writelines(json.dumps({"model": name, "kind": kind[:-1]} | score) + "\n" for score in scores)
    result = {
        "models": {
            name: {key: answer[key] for key in ("pairs", "actions", "seconds")} for name, answer in measured.items()
        },
        "held_out": {
            "pairs": rows.count_rows(rows.pairs_file(datasets)),
            "actions": rows.count_rows(rows.actions_file(datasets)),
        },
        "beta": config.preference.beta,
        "gamma": config.preference.simpo_gamma,
        "adapters": {name: str(folder) for name, folder in adapters.items()},
    }
    write_json(out_dir / "evaluation.json", result)
    draw(measured, out_dir / "evaluation.png")
    (out_dir / "evaluation.md").write_text(render(result), encoding="utf-8")
    return _figures(result)


def run_worker(
    config: RunConfig, model_dir: Path, datasets: Path, request: Request, out_dir: Path, on_line: OnLine | None = None
) -> None:
    """Have a worker process do what is asked, on one GPU or the CPU. Raises what the launcher raises."""
    job = Job(
        kind="evaluate",
        trainer="traceforge_core.evaluation.worker:work",
        config=config,
        model_dir=model_dir,
        data=datasets,
        out_dir=out_dir,
        device=resolve_device(config.model),
    )
    out_dir.mkdir(parents=True, exist_ok=True)
    request.write(out_dir)
    launch(job, seats(job), on_line=on_line)


def nothing_held_out(config: RunConfig, datasets: Path) -> str | None:
    """Why there is nothing to evaluate on, or None."""
    if not datasets.is_dir():
        raise TraceForgeError(f"There is no folder {datasets}. Name the folder of a finished datasets stage.")
    limits = config.evaluation
    pairs, actions = rows.count_rows(rows.pairs_file(datasets)), rows.count_rows(rows.actions_file(datasets))
    if min(pairs, limits.max_pairs) + min(actions, limits.max_actions) > 0:
        return None
    if pairs + actions > 0:
        return "evaluation.max_pairs and evaluation.max_actions leave no row. Raise one of them."
    return (
        f"{datasets} holds out no pairs and no actions. Raise datasets.split.held_out (a share of the cases; with few "
        "cases it may round to none) and build the datasets again."
    )


def named_adapters(given: Sequence[str]) -> dict[str, Path]:
    """Adapters as people name them, NAME=DIR or DIR, by name: without one, the folder's (or, for one that is called
    `adapter`, that of the folder it lies in). Raises TraceForgeError where two have one name."""
    named: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        folder = written(path if equals else text)
        if not equals:
            whole = folder.resolve()
            name = (whole.parent if whole.name == "adapter" else whole).name.replace(".", "_")
        if name in named:
            raise TraceForgeError(f"Two adapters are named {name}: give them names of their own, as NAME=DIR.")
        named[name] = folder
    return named


def check_adapters(adapters: Mapping[str, Path]) -> dict[str, str]:
    """Folders as absolute paths. Raises TraceForgeError where one is no adapter, or is named as the base model is."""
    for name, folder in adapters.items():
        if name in (BASE, "default") or not name or "." in name:
            raise TraceForgeError(f"{name!r} cannot name an adapter here: the name must not be {BASE}, or have a dot.")
        if not (folder / "adapter_config.json").is_file():
            raise TraceForgeError(
                f"There is no adapter in {folder} (adapter_config.json is missing). Name a folder in PEFT's "
                "format, such as runs/RUN/sft/adapter."
            )
    return {name: str(folder.resolve()) for name, folder in adapters.items()}


def _figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """Each figure by model, None where there are no rows of its kind."""
    models = result["models"]

    def by_model(kind: str, key: str) -> dict[str, Any]:
        return {name: answer[kind][key] if answer[kind] else None for name, answer in models.items()}

    return {
        "pairs": (models[BASE]["pairs"] or {}).get("pairs", 0),
        "actions": (models[BASE]["actions"] or {}).get("actions", 0),
        "accuracy": by_model("pairs", "accuracy"),
        "margin": by_model("pairs", "margin"),
        "length_correlation": by_model("pairs", "length_correlation"),
        "action_loss": by_model("actions", "loss"),
        "token_accuracy": by_model("actions", "token_accuracy"),
    }
