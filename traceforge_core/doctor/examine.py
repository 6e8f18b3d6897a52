"""Look a machine over: what it has, what is installed, what really works, and which preset suits.

    checkup = examine()
    checkup.findings, checkup.preset, checkup.settings      # to_json() for all of it as plain data

Nothing is changed, and no GPU memory is held afterwards: whatever touches a GPU runs in a process of its own with a
time limit, so that a crash or a hang is one more finding.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from traceforge_core.doctor import installed, machine, presets
from traceforge_core.doctor.findings import Finding
from traceforge_core.doctor.trying import Trial, run_trial
from traceforge_core.errors import page


@dataclass(frozen=True, slots=True)
class Checkup:
    """All findings in the order of reading. `preset` suits this machine, with `settings` (section.field=value) on top;
    `reason` says why."""

    findings: list[Finding]
    preset: str
    settings: list[str]
    reason: str

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == "problem"]

    def to_json(self) -> dict[str, Any]:
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "problems": len(self.problems),
            "preset": self.preset,
            "settings": self.settings,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class _Plan:
    """A trial: how many GPUs and which package it needs, its time limit, what a failure means and what mends it."""

    name: str
    gpus: int
    limit: float
    package: str | None = None
    failure: str = "problem"
    cure: str = ""


PLANS = (
    _Plan(
        "torch works", 0, 90, cure="Reinstall torch for this machine's driver: https://pytorch.org/get-started/locally"
    ),
    _Plan(
        "bf16 products",
        1,
        90,
        cure=f"Set model.cublaslt=on: cuBLASLt takes these products. {page('cublas-invalid-value')}",
    ),
    _Plan("attention: flash", 0, 60, failure="warning", cure="PyTorch takes another attention kernel."),
    _Plan("attention: cudnn", 1, 60, failure="warning", cure="PyTorch takes flash attention: slower at long context."),
    _Plan("attention: efficient", 1, 60, failure="warning", cure="PyTorch takes another attention kernel."),
    _Plan("attention: math", 0, 60, cure="Set model.attention=eager, and reinstall torch."),
    _Plan("NF4", 1, 90, "bitsandbytes", cure="Set model.quantization=none, or reinstall bitsandbytes."),
    _Plan("pinned memory", 1, 60, failure="warning", cure="Raise `ulimit -l` and the container's memory limit."),
    _Plan("gloo", 0, 60, cure="Set GLOO_SOCKET_IFNAME to a network interface that is up (lo on one host)."),
    _Plan(
        "NCCL",
        2,
        90,
        failure="warning",
        cure=f"Set preference.transport=gloo (0.1 s more a step for an 8B model). {page('nccl')}",
    ),
    _Plan(
        "unsloth", 1, 300, "unsloth", failure="warning", cure="Set model.backend=transformers, or reinstall unsloth."
    ),
)


def examine(folder: Path = Path("runs")) -> Checkup:
    """Look at everything. `folder`: where runs would lie (its disk is looked at; it need not exist)."""
    gpus, broken = machine.read_gpus()
    usable = machine.usable_gpus(gpus)
    findings = [*([broken] if broken else []), *machine.look_at_gpus(gpus), *machine.look_at_host(gpus, folder)]
    findings += installed.look_at_packages(bool(gpus))
    here = {finding.subject for finding in findings if finding.figures.get("version")}
    ready = [plan for plan in PLANS if _missing(plan, len(usable), here) is None]
    side_by_side = max(1, min(4, len(os.sched_getaffinity(0)) // 2))
    with ThreadPoolExecutor(max_workers=side_by_side) as pool:
        slowest_first = sorted(ready, key=lambda plan: -plan.limit)
        trials = dict(
            zip(
                (plan.name for plan in slowest_first),
                pool.map(lambda plan: run_trial(plan.name, plan.limit), slowest_first),
                strict=True,
            )
        )
    for plan in PLANS:
        reason = _missing(plan, len(usable), here)
        if reason is None:
            findings.append(_judge(plan, trials[plan.name], bool(gpus)))
        else:
            findings.append(Finding(plan.name, "not tried", reason))
    if usable and not any(trials[f"attention: {kernel}"].ok for kernel in ("flash", "cudnn", "efficient")):
        lost = "No memory-saving attention kernel works here: attention at 8K tokens and more will not fit."
        findings.append(Finding("attention", "problem", lost, "Reinstall torch for this driver."))
    # A GPU that torch cannot use is no GPU for training.
    trained_on = usable if trials["torch works"].ok and trials["torch works"].figures.get("bf16") is not None else []
    preset, settings, reason = presets.choose(
        trained_on, {name for name, trial in trials.items() if not trial.ok}, here
    )
    return Checkup(findings, preset, settings, reason)


def _missing(plan: _Plan, gpus: int, here: set[str]) -> str | None:
    """Why a trial cannot be made here, or None."""
    if gpus < plan.gpus:
        return "needs a GPU" if plan.gpus == 1 else f"needs {plan.gpus} GPUs"
    if plan.package is not None and plan.package not in here:
        return f"{plan.package} is not installed"
    return None


def _judge(plan: _Plan, trial: Trial, has_gpu: bool) -> Finding:
    figures = trial.figures | {"seconds": trial.seconds}
    if not trial.ok:
        return Finding(plan.name, plan.failure, trial.what, plan.cure, figures)  # type: ignore[arg-type]
    if plan.name == "torch works" and has_gpu and trial.figures.get("bf16") is None:
        return Finding(plan.name, "problem", f"{trial.what}, though there is a GPU", plan.cure, figures)
    if plan.name == "bf16 products" and trial.figures.get("default") is not None:
        works = trial.figures.get("cublaslt") is None
        cure = plan.cure if works else "Install another torch (2.8 and its CUDA 12.x builds are not known to fail)."
        return Finding(plan.name, "problem", trial.what, cure, figures)
    return Finding(plan.name, "ok", trial.what, "", figures)
