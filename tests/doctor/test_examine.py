"""The whole checkup of this machine, and what stands in it when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from traceforge_core.doctor import installed, machine
from traceforge_core.doctor.examine import PLANS, examine
from traceforge_core.doctor.machine import Gpu
from traceforge_core.doctor.report import render
from traceforge_core.doctor.trials import TRIALS

DOCS = Path(__file__).parents[2] / "docs" / "errors"


@pytest.mark.slow
def test_a_checkup_of_this_machine_tries_everything_it_can_in_half_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    started = time.monotonic()
    checkup = examine(tmp_path / "runs")
    assert time.monotonic() - started < 30
    by_subject = {finding.subject: finding for finding in checkup.findings}
    assert set(TRIALS) <= set(by_subject)
    assert by_subject["gloo"].status == by_subject["attention: math"].status == "ok"
    assert by_subject["NCCL"].status == "not tried"
    assert by_subject["disk"].figures["free_gib"] > 0
    assert by_subject["trl"].what == metadata.version("trl")
    assert checkup.preset == "tiny-cpu"
    assert json.loads(json.dumps(checkup.to_json()))["problems"] == len(checkup.problems)
    text = render(checkup)
    assert text.rstrip().endswith("traceforge run --preset tiny-cpu")


def test_importing_the_doctor_costs_no_torch() -> None:
    code = "import sys, traceforge_core.doctor.examine, traceforge_core.doctor.report; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


def test_every_plan_has_its_trial_and_a_cure_whose_page_is_there() -> None:
    assert [plan.name for plan in PLANS] == list(TRIALS)
    for plan in PLANS:
        assert plan.cure
        if "docs/errors/" in plan.cure:
            assert (DOCS / plan.cure.rpartition("docs/errors/")[2].rstrip(".")).is_file()


def test_a_version_outside_the_known_range_is_a_warning_that_names_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        installed, "known_requirements", lambda: [Requirement("pytest<1"), Requirement("no-such-thing>=2")]
    )
    _, old, missing = installed.look_at_packages(has_gpu=False)
    assert (old.status, missing.status) == ("warning", "problem")
    assert metadata.version("pytest") in old.what and "<1" in old.what
    assert missing.do == "pip install 'no-such-thing>=2'"


@pytest.mark.parametrize(("visible", "left"), [("1", [1]), ("", []), ("-1", []), ("1,0", [1, 0]), ("0,7", [0])])
def test_only_gpus_left_visible_count(visible: str, left: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(index, "Card", 24576, 24576, (8, 9), "580.65", "13.0") for index in range(2)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in machine.usable_gpus(gpus)] == left
