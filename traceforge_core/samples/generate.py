"""Make the sample trajectories and their run reports anew.

    python -m traceforge_core.samples.generate [FOLDER]        # default: traceforge_core/samples/data

Five runs over all cases. In each run the behaviours are dealt out differently, so that every case is solved by some
runs and not by others. Writes FOLDER/<run>/<case>/<case>.traj.json and FOLDER/<run>/<run>.eval.json. Needs bash, git.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from traceforge_core.samples import behaviours
from traceforge_core.samples.agent import patch_of, run_agent
from traceforge_core.samples.cases import Case, load_cases
from traceforge_core.samples.judge import Verdict, judge, run_report

log = logging.getLogger(__name__)

DATA = Path(__file__).parent / "data"
RUNS = ("run-1", "run-2", "run-3", "run-4", "run-5")
DEALT = (behaviours.steady, behaviours.hasty, behaviours.stumbling, behaviours.lost, behaviours.brisk)
IN_PLACE_OF_LOST = {
    "cachebox__cachebox-31": behaviours.speechless,
    "layerconf__layerconf-18": behaviours.cut_short,
    "routemap__routemap-9": behaviours.interrupted,
    "tidycsv__tidycsv-23": behaviours.speechless,
}


def behaviour_of(cases: Sequence[Case], case: Case, run: str) -> behaviours.Behaviour:
    """Which behaviour works on a case in a run."""
    dealt = DEALT[(cases.index(case) + RUNS.index(run)) % len(DEALT)]
    return IN_PLACE_OF_LOST.get(case.name, dealt) if dealt is behaviours.lost else dealt


def generate(folder: Path) -> None:
    """Write every trajectory and report below `folder`, replacing what earlier calls wrote there."""
    cases = load_cases()
    for run in RUNS:
        shutil.rmtree(folder / run, ignore_errors=True)
        verdicts: dict[str, Verdict] = {}
        for case in cases:
            trajectory = run_agent(case, behaviour_of(cases, case, run), run)
            write(folder / run / case.name / f"{case.name}.traj.json", trajectory)
            verdicts[case.name] = judge(case, patch_of(trajectory))
            log.info("%s %s: %s", run, case.name, verdicts[case.name])
        write(folder / run / f"{run}.eval.json", run_report(verdicts))


def write(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object with one line a message, or an id: small, and good to compare."""
    fields = []
    for name, field in value.items():
        if isinstance(field, list) and field:
            lines = ",\n".join(json.dumps(item, ensure_ascii=False) for item in field)
            fields.append(f"{json.dumps(name)}: [\n{lines}\n]")
        else:
            fields.append(f"{json.dumps(name)}: {json.dumps(field, ensure_ascii=False)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(fields) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else DATA)
