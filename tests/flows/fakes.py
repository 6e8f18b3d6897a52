"""Stand-ins for the stages, quick ones, so that flow and command line can be tested by themselves.

As a program it is the command `traceforge` with these stages: python fakes.py run --runs-dir X. What a stage does on
top of its files comes from the environment variable FAKE_<STAGE>: fail, crash, disagree, hang, stop,
fill, window (the model has one).
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from traceforge_core import stages
from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.runs import Run, run_folder_of

FIGURES: dict[str, dict[str, Any]] = {
    "ingest": {
        "found": 5,
        "read": 3,
        "quarantined": 1,
        "duplicates": 1,
        "by_outcome": {"resolved": 2, "unresolved": 1},
    },
    "model": {"name": "fake"},
    "datasets": {"sft_samples": 7, "pairs": 4, "pairs_by_miner": {"outcome": 3, "recovery": 1}},
    "compare": {"verdict": "pass", "branch_parallel": {"verdict": "pass", "max_loss_difference": 1e-9}},
}
TRAINED = {"steps": 3, "first_loss": 2.5, "last_loss": 1.5}


def fake(name: str) -> Callable[[RunConfig, Mapping[str, Path], Path], dict[str, Any]]:
    def stage(config: RunConfig, inputs: Mapping[str, Path], out_dir: Path) -> dict[str, Any]:
        (out_dir / "output.txt").write_text(f"{name} from {', '.join(sorted(inputs))}\n", encoding="utf-8")
        what = os.environ.get(f"FAKE_{name.upper()}")
        if name == "model":
            (out_dir / "weights").mkdir()
            shape = {"model_type": "mistral", "sliding_window": 64} if what == "window" else {"model_type": "qwen3"}
            (out_dir / "weights" / "config.json").write_text(json.dumps(shape))
            (out_dir / "model.json").write_text(json.dumps({"weights": "weights", "revision": None}))
        if what == "fail":
            raise TraceForgeError(f"The fake stage {name} was asked to fail. Unset FAKE_{name.upper()}.")
        if what == "crash":
            raise ZeroDivisionError("a fault nobody foresaw")
        if what == "hang":
            hang(out_dir)
        if what == "stop":
            Run(run_folder_of(out_dir)).stop_file.touch()
        if what == "fill":
            (out_dir / "large.bin").write_bytes(bytes(2**26))
        print(f"{name} prints to stdout", flush=True)
        import logging

        logging.getLogger(f"traceforge_core.{name}").info("a line from %s", name)
        figures = dict(FIGURES.get(name, TRAINED))
        if what == "disagree":
            figures["verdict"] = "fail"
        if name == "compare":
            (out_dir / "report.md").write_text("# The report\n\n![loss](loss.png)\n", encoding="utf-8")
            (out_dir / "loss.png").write_bytes(PNG)
            report = {"verdict": figures["verdict"], "strategies": {}, "evaluation": None, "planted_faults": None}
            (out_dir / "report.json").write_text(json.dumps(report), encoding="utf-8")
        return figures

    return stage


def hang(out_dir: Path) -> None:
    """Start a child that would go on for ever, as a training does, and wait for it."""
    child = subprocess.Popen(["sleep", "600"])
    (out_dir / "child.pid").write_text(str(child.pid))
    try:
        child.wait()
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(timeout=10)
        time.sleep(0.2)


PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c636060f8cf00000301"
    "0100c9fe92ef0000000049454e44ae426082"
)


def install() -> dict[str, stages.Stage]:
    """The table of stages with every function replaced."""
    module = sys.modules["fake_stages"] = sys.modules[__name__]
    for name in stages.STAGES:
        setattr(module, name, fake(name))
    return {
        name: dataclasses.replace(stage, function=f"fake_stages:{name}", resumable=False)
        for name, stage in stages.STAGES.items()
    }


if __name__ == "__main__":
    stages.STAGES.update(install())
    stages._outside = lambda name, config: {}  # no corpus is read
    from flows.cli import main

    main()
