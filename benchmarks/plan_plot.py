"""The planner's plot for Qwen3-8B with the peaks that were measured on it: docs/images/plan.png.

    python benchmarks/plan_plot.py                          # from results/long_context_h200.jsonl
    python benchmarks/plan_plot.py RESULTS.jsonl PLOT.png

Peaks of branches and pairs with completions of 4,096 tokens in tiles, the newest of every length. Planned is for a card
of 24 GiB: where that is tight, with the smallest tiles and the most groups of heads, as on a larger card when that is.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.random_weights import SHAPES  # noqa: E402
from traceforge_core.longcontext.estimate import Setup  # noqa: E402
from traceforge_core.longcontext.memory import Dimensions  # noqa: E402
from traceforge_core.longcontext.planner import plot  # noqa: E402

COMPLETION = 4096
NAMED = {"tiled": ("branch_parallel", 77_824), "pair, shared prefix": ("shared_prefix", 77_824)}
LENGTH = re.compile(r"([\d,]+) \+ (2 × )?4,?096$")


def main() -> None:
    source, picture = (*map(Path, sys.argv[1:]), *[None] * 2)[:2]
    records = (source or ROOT / "benchmarks" / "results" / "long_context_h200.jsonl").read_text(encoding="utf-8")
    found = measured(json.loads(line) for line in records.splitlines())
    for point in found:
        print(f"{point['kind']}, {point['prompt']:,} + {COMPLETION:,}: {point['gib']:.2f} GiB")
    shape = SHAPES["qwen3-8b"]
    setup = Setup(gpu_gib=24, optimizer_bytes=0)
    plot(dimensions(shape), setup, COMPLETION, picture or ROOT / "docs" / "images" / "plan.png", found)


def measured(records: Any) -> list[dict[str, Any]]:
    """Points of the plot out of long_context.py's records."""
    points = {}
    for record in records:
        name, section = record["name"], record["section"]
        wanted = section == "branch" or name.startswith(("longest pair", "whole pair"))
        if not wanted or "peak_gib" not in record or record.get("out_of_memory"):
            continue
        if name in NAMED:
            points[NAMED[name]] = record["peak_gib"]
        elif length := LENGTH.search(name):
            kind = "branch_parallel" if name.startswith("tiled") else "shared_prefix"
            points[kind, int(length[1].replace(",", ""))] = record["peak_gib"]
    return [{"kind": kind, "prompt": prompt, "gib": gib} for (kind, prompt), gib in sorted(points.items())]


def dimensions(shape: dict[str, Any]) -> Dimensions:
    from transformers import Qwen3Config

    return Dimensions.of(Qwen3Config(**shape, head_dim=128))


if __name__ == "__main__":
    main()
