"""What is installed, against the versions that are known to work together (the project's own requirements)."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from traceforge_core.doctor.findings import Finding

OPTIONAL = {
    "prefect": "the flows and `traceforge run`",
    "typer": "the command line",
    "rich": "the command line",
    "bitsandbytes": "NF4 weights and the 8-bit optimizer",
    "unsloth": "Unsloth's faster training on one GPU",
}
"""Packages that a machine may do without, and what for."""
LOOKED_AT = ("flows", "cuda", "unsloth")
"""The extras that matter for a run; the others are for development and clusters."""


def known_requirements() -> list[Requirement]:
    """The requirements of this checkout's pyproject.toml, or of the installed package, with those extras."""
    checkout = Path(__file__).parents[2] / "pyproject.toml"
    if checkout.is_file():  # a checkout is newer than the metadata of an editable installation
        project = tomllib.loads(checkout.read_text(encoding="utf-8"))["project"]
        extras = project.get("optional-dependencies", {})
        lines = [
            *project["dependencies"],
            *(line for name in LOOKED_AT for line in extras.get(name, [])),
        ]
        return [Requirement(line) for line in lines]
    try:
        wanted = [Requirement(line) for line in metadata.requires("traceforge-core") or []]
    except metadata.PackageNotFoundError:
        return []
    return [
        each
        for each in wanted
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *LOOKED_AT))
    ]


def look_at_packages(has_gpu: bool) -> list[Finding]:
    """One finding a package, in the order of the requirements. What only a GPU needs is a note on a CPU machine."""
    python = ".".join(map(str, sys.version_info[:3]))
    findings = [
        Finding("python", "ok", python, figures={"version": python})
        if sys.version_info >= (3, 11)
        else Finding("python", "problem", python, "TraceForge needs Python 3.11 or newer.", {"version": python})
    ]
    seen = set()
    for wanted in known_requirements():
        if wanted.name not in seen:
            seen.add(wanted.name)
            findings.append(_look_at(wanted, has_gpu))
    return findings


def _look_at(wanted: Requirement, has_gpu: bool) -> Finding:
    figures = {"wanted": str(wanted.specifier), "version": None}
    purpose = OPTIONAL.get(wanted.name)
    install = f"pip install '{wanted.name}{wanted.specifier}'"
    try:
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        if purpose is None:
            return Finding(wanted.name, "problem", "not installed", install, figures)
        gpu_only = wanted.name in ("bitsandbytes", "unsloth")
        status = "warning" if has_gpu or not gpu_only else "note"
        do = install if has_gpu or not gpu_only else ""
        return Finding(wanted.name, status, f"not installed (for {purpose})", do, figures)  # type: ignore[arg-type]
    figures["version"] = version
    if wanted.specifier.contains(version, prereleases=True):
        return Finding(wanted.name, "ok", version, "", figures)
    what = f"{version}; known to work: {wanted.specifier}"
    return Finding(wanted.name, "warning", what, install, figures)
