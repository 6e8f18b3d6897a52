"""The same comparison in float32, beside a bfloat16 run: a few steps in which rounding hides nothing.

    told = compare_exactly(config, {"model": ..., "datasets": ..., "sft": ...}, out_dir)
    told["branch_parallel"]["outcome"]          # "pass" or "fail"

Strategies compute the same function of any model, so a small part of a large one will do: its first two layers,
unpacked where they are quantised, and pairs cut to 768 tokens (or to what the oracle can hold). What is found here is
wrong; what is not is right to 1e-5.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from traceforge_core.comparison.parity import measure
from traceforge_core.comparison.rounding import WAYS, rounding_of
from traceforge_core.comparison.series import run_series
from traceforge_core.comparison.tolerances import judge_exactly
from traceforge_core.config import RunConfig, lay_over
from traceforge_core.errors import TraceForgeError
from traceforge_core.training.job import STRATEGIES, Job, Kind
from traceforge_core.training.stages import preference_job

Planted = tuple[Kind, str | None]
logger = logging.getLogger(__name__)
STEPS = 3
LAYERS = 2
WHOLE_BYTES = 1 << 30  # of weights as they lie on the disk; above it only the first layers are taken
CUT_TO = 768
FASTEST = 1e-3


def compare_exactly(
    config: RunConfig, inputs: Mapping[str, Path], out_dir: Path, planted: Mapping[str, Planted] | None = None
) -> dict[str, Any]:
    """For each strategy there is: outcome, reasons, what is wrong first. {} where it is off, or cannot be had.

    `planted`: instead, by any name, a strategy and the fault to plant in it (None for none).
    """
    if config.comparison.exact == "off":
        return {}
    scratch = out_dir / "exact"
    smaller = lay_over(config, assignments=[f"{name}={value}" for name, value in settings(config).items()])
    try:
        part = _smaller_inputs(config, inputs, scratch)
        if isinstance(part, str):
            logger.info("No comparison in float32: %s.", part)
            return {}
        told: dict[str, Any] = {}
        oracle = _short(preference_job("oracle", smaller, part, scratch / "oracle" / "run"))
        ways = {name: replace(oracle, out_dir=scratch / "oracle" / name) for name in WAYS}
        run_series({"oracle": oracle, **ways}, scratch / "oracle", variants=WAYS, last_step=STEPS)
        rounding = rounding_of(oracle.out_dir, [way.out_dir for way in ways.values()])
        wanted = planted or {kind: (kind, None) for kind in STRATEGIES}
        for kind in dict.fromkeys(kind for kind, _ in wanted.values()):
            jobs = {
                name: _short(preference_job(kind, smaller, part, scratch / kind / f"{number:02d}"), fault)
                for number, (name, (its, fault)) in enumerate(wanted.items())
                if its == kind
            }
            for name, stopped in run_series(jobs, scratch / kind, share_gpu=True).items():
                if stopped is not None:
                    told[name] = {"outcome": "fail", "reasons": [stopped], "first": None}
                    continue
                verdict = judge_exactly(measure(oracle.out_dir, jobs[name].out_dir, rounding), config.comparison)
                told[name] = asdict(verdict)
                logger.info("%s in float32: %s (%s).", name, verdict.outcome, verdict.reasons[0])
        return told
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def settings(config: RunConfig) -> dict[str, Any]:
    """What is other than in the run itself. The weights move by FASTEST at least, and from the first step on: with a
    warm-up, or at the rates of SimPO on a large model, they would hardly move in three steps, and a wrong optimizer
    would stay below the limit of what adapters may differ by."""
    return {
        "model.dtype": "float32",
        "model.quantization": "none",
        "model.backend": "transformers",
        "preference.max_steps": STEPS,
        "preference.optimizer": "adamw_torch",
        "preference.learning_rate": max(FASTEST, config.preference.learning_rate),
        "preference.warmup_steps": 0,
        "preference.report_to": [],
        "comparison.gradient_steps": STEPS,
    }


def _short(job: Job, fault: str | None = None) -> Job:
    """The job on cut pairs; over gloo, since its workers may have to share a GPU."""
    cut_to = min(CUT_TO, job.config.comparison.oracle_max_length or CUT_TO)
    return replace(job, held_out=None, cut_to=cut_to, transport="gloo", planted_fault=fault)


def _smaller_inputs(config: RunConfig, inputs: Mapping[str, Path], scratch: Path) -> dict[str, Path] | str:
    """Inputs of which a float32 run is affordable, or why there are none."""
    from traceforge_core.modeling.loading import weights_of

    weights, revision = weights_of(inputs["model"])
    folder = Path(weights)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else WHOLE_BYTES + 1
    about = folder / "config.json"
    packed = about.is_file() and "quantization_config" in json.loads(about.read_text(encoding="utf-8"))
    if size <= WHOLE_BYTES and not packed:
        return dict(inputs)
    try:
        return {**inputs, **_first_layers(config, inputs, weights, revision, scratch)}
    except TraceForgeError as error:
        return str(error)


def _first_layers(
    config: RunConfig, inputs: Mapping[str, Path], weights: str, revision: str | None, scratch: Path
) -> dict[str, Path]:
    """The model stage's folder, and the adapter, with two layers; unpacked, where the weights are quantised. On the
    CPU: this process lives on beside the workers, which need the GPU."""
    import torch

    from traceforge_core.modeling.unpacked import load_unpacked

    trusted = config.model.trust_remote_code
    model, _ = load_unpacked(weights, revision, torch.bfloat16, layers=LAYERS, trust_remote_code=trusted)
    folder = scratch / "model"
    model.save_pretrained(folder / "weights")
    shutil.copytree(inputs["model"] / "tokenizer", folder / "tokenizer")
    facts = json.loads((inputs["model"] / "model.json").read_text(encoding="utf-8"))
    facts |= {"weights": "weights", "quantized": None}
    (folder / "model.json").write_text(json.dumps(facts), encoding="utf-8")
    return {"model": folder} | ({"sft": _first_layers_of_adapter(inputs["sft"], scratch)} if "sft" in inputs else {})


def _first_layers_of_adapter(sft: Path, scratch: Path) -> Path:
    import re

    from safetensors.torch import save_file

    from traceforge_core.modeling.adapters import WEIGHTS, read_adapter

    folder = scratch / "sft" / "adapter"
    folder.mkdir(parents=True)
    shutil.copy(sft / "adapter" / "adapter_config.json", folder)
    kept = {}
    for name, tensor in read_adapter(sft / "adapter").items():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer is None or int(layer[1]) < LAYERS:
            kept[name] = tensor
    save_file(kept, folder / WEIGHTS)
    return folder.parent
