"""The stage that puts the comparison itself to the test: every known fault is planted, and has to be found.

    figures = plant_faults(config, {"model": ..., "datasets": ..., "sft": ...}, out_dir)
    figures["verdict"], figures["missed"]           # "pass", []

In float32, on the run's own model (its first two layers where it is large) and six of its pairs, with settings under
which each fault changes something. Leaves report.md and planted_faults.json, which the stage compare takes into its
report and verdict: a comparison that no longer finds a mistake proves nothing, whatever it says of the strategies.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traceforge_core.comparison.detection import CLEAN, Detection, detection_in
from traceforge_core.comparison.document import Heading, Part, Table, Text, markdown
from traceforge_core.comparison.exact import STEPS, Planted, compare_exactly
from traceforge_core.comparison.faults.registry import FAULTS, faults_of
from traceforge_core.comparison.report import planted_in_short
from traceforge_core.config import RunConfig, lay_over
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import write_json
from traceforge_core.training.job import STRATEGIES

FILE = "planted_faults.json"
PAIRS_A_STEP = 2
CUT_TO = 384
# Whatever the run's own settings are: more than one pair a step, all gradients clipped, a rate that changes with every
# step, and β, γ and γ/β three different numbers.
SETTINGS: dict[str, Any] = {
    "comparison.exact": "auto",
    "comparison.oracle_max_length": CUT_TO,
    "preference.gradient_accumulation": PAIRS_A_STEP,
    "preference.batch_size": 1,
    "preference.replicas": 1,
    "preference.max_grad_norm": 1e-3,
    "preference.schedule": "linear",
    "preference.beta": 2.0,
    "preference.simpo_gamma": 0.5,
    "preference.label_smoothing": 0.0,
    "preference.cpo_alpha": 0.0,
}


def plant_faults(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> dict[str, Any]:
    """Train each strategy without a fault and with every fault that it can have, and compare. Figures: verdict ("fail"
    where a fault was missed or a clean run was called wrong), planted, caught, by "strategy: fault" missed and
    pointed_elsewhere (caught, and the report points at something else), and by "strategy: what" false_alarms.

    Raises TraceForgeError where no float32 part of the model can be had.
    """
    scratch = out_dir / "pairs"
    pairs, observed = _telling_pairs(inputs["datasets"], scratch)
    planted: dict[str, Planted] = {}
    for kind in STRATEGIES:
        planted[f"{kind}: {CLEAN}"] = kind, None
        for fault in faults_of(kind):
            if observed or fault.needs != "observations":
                planted[f"{kind}: {fault.name}"] = kind, fault.name
    settings = lay_over(config, assignments=[f"{name}={value}" for name, value in SETTINGS.items()])
    told = compare_exactly(settings, {**inputs, "datasets": pairs}, out_dir, planted)
    shutil.rmtree(scratch)
    if not told:
        raise TraceForgeError(
            "No fault can be planted: there is no comparison in float32 (comparison.exact is off, or the line before "
            "this says why). Leave the stage planted_faults out, or mend that."
        )
    found = {name: detection_in(planted[name][1] or CLEAN, one) for name, one in told.items()}
    figures = figures_of(found)
    write_json(out_dir / FILE, {"figures": figures, "detections": {name: one.as_dict() for name, one in found.items()}})
    (out_dir / "report.md").write_text(markdown(_report(found, figures)), encoding="utf-8")
    return figures


def read_planted(folder: Path) -> dict[str, Any] | None:
    """The figures of a finished stage; None where its file is torn or gone."""
    try:
        found: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))["figures"]
        return found
    except (OSError, ValueError, KeyError):
        return None


def figures_of(found: Mapping[str, Detection]) -> dict[str, Any]:
    """What the detections come to, as the stage's figures."""
    planted = {name: one for name, one in found.items() if one.fault != CLEAN}
    missed = [name for name, one in planted.items() if not one.caught]
    clean = {name.partition(":")[0]: one for name, one in found.items() if one.fault == CLEAN}
    alarms = [f"{kind}: {_said(one)}" for kind, one in clean.items() if not one.right]
    return {
        "verdict": "fail" if missed or alarms else "pass",
        "planted": len(planted),
        "caught": len(planted) - len(missed),
        "missed": missed,
        "pointed_elsewhere": [name for name, one in planted.items() if one.caught and not one.right],
        "false_alarms": alarms,
    }


def _report(found: Mapping[str, Detection], figures: Mapping[str, Any]) -> list[Part]:
    """A row a fault: what is wrong, and what the comparison of each strategy said."""
    rows = []
    for fault in FAULTS.values():
        said = [found.get(f"{kind}: {fault.name}") for kind in STRATEGIES]
        if any(said):
            what = " ".join(fault.what.split("\n\n")[0].split())
            rows.append([f"`{fault.name}`", what, *("-" if one is None else _said(one) for one in said)])
    header = ["fault", "what is wrong", *STRATEGIES]
    return [Heading("Planted faults", 1), Text(planted_in_short(figures)), Table(header, rows)]


def _said(one: Detection) -> str:
    if one.outcome == "stopped":
        return "the workers refused to go on"
    return f"{one.pointed_at}, step {one.step}" if one.caught else "**missed**"


def _telling_pairs(datasets: Path, folder: Path) -> tuple[Path, bool]:
    """As many of the pairs as the training takes, those with an observation in a completion first; and whether there
    is one."""
    import pyarrow.parquet as pq

    table = pq.read_table(datasets / "preference" / "train.parquet")
    observed = [
        index
        for index, row in enumerate(table.select(["chosen_mask", "rejected_mask"]).to_pylist())
        if 0 in row["chosen_mask"][: CUT_TO // 2] or 0 in row["rejected_mask"][: CUT_TO // 2]
    ]
    others = [index for index in range(table.num_rows) if index not in set(observed)]
    (folder / "preference").mkdir(parents=True)
    pq.write_table(table.take((observed + others)[: STEPS * PAIRS_A_STEP]), folder / "preference" / "train.parquet")
    return folder, bool(observed)
