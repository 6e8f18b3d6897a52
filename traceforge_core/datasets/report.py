"""What the two datasets are: counts, lengths, balance of the pairs, what was dropped and why, and that no case leaks.

report = DatasetReport(config.datasets)
report.add_sample(figures); report.add_pair("held_out", pair)
figures = report.write(out_dir)        # report.json and report.md
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from traceforge_core.config import DatasetsConfig
from traceforge_core.datasets.preference import PreferencePair
from traceforge_core.datasets.sft_jobs import SampleFigures
from traceforge_core.datasets.splits import Side, grouping
from traceforge_core.errors import TraceForgeError

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


class DatasetReport:
    """Collects numbers only, a few bytes a sample."""

    def __init__(self, config: DatasetsConfig) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()
        self.candidates: Counter[str] = Counter()
        self.pairs_by_miner: Counter[str] = Counter()
        self.dropped_samples: Counter[str] = Counter()
        self.dropped_pairs: Counter[str] = Counter()
        self._lengths: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
        self.repeated_turns: Counter[str] = Counter()
        self.repeated_trajectories = 0
        self._trimmed_samples = 0
        self._chosen_longer = 0

    def add_sample(self, sample: SampleFigures) -> None:
        self.counts[f"sft_{sample.side}"] += 1
        self._lengths["sft: tokens in a sample"].append(sample.tokens)
        self._lengths["sft: tokens in the loss"].append(sample.learned)
        self._trimmed_samples += sample.trimmed > 0

    def add_repeats(self, format_name: str, repeated: int, learnable: int) -> None:
        """Count a trajectory `repeated` of whose `learnable` turns are learnt in another one."""
        self.repeated_turns[format_name] += repeated
        self.repeated_trajectories += repeated == learnable > 0

    def add_pair(self, side: Side, pair: PreferencePair) -> None:
        self.counts[f"pairs_{side}"] += 1
        self.pairs_by_miner[pair.miner] += 1
        prompt, chosen, rejected = len(pair.prompt_ids), len(pair.chosen_ids), len(pair.rejected_ids)
        scored_chosen, scored_rejected = int(pair.chosen_mask.sum()), int(pair.rejected_mask.sum())
        lengths = self._lengths
        lengths["pairs: tokens in the prompt"].append(prompt)
        lengths["pairs: tokens in chosen"].append(chosen)
        lengths["pairs: tokens in rejected"].append(rejected)
        lengths["pairs: scored tokens in chosen"].append(scored_chosen)
        lengths["pairs: scored tokens in rejected"].append(scored_rejected)
        lengths["pairs: tokens in the longer branch"].append(prompt + max(chosen, rejected))
        lengths["pairs: share of the prompt"].append(2 * prompt / (2 * prompt + chosen + rejected))
        lengths["pairs: log of scored chosen / rejected"].append(math.log(scored_chosen / scored_rejected))
        self._chosen_longer += scored_chosen > scored_rejected

    def longer_than(self, tokens: int) -> dict[str, int]:
        """How many samples, and how many pairs by their longer branch, have more tokens."""
        names = {"SFT samples": "sft: tokens in a sample", "pairs": "pairs: tokens in the longer branch"}
        return {what: sum(length > tokens for length in self._lengths[name]) for what, name in names.items()}

    def figures(self) -> dict[str, Any]:
        """The numbers worth showing."""
        pairs = self.counts["pairs_train"] + self.counts["pairs_held_out"]
        return {
            "sft_samples": self.counts["sft_train"],
            "sft_held_out": self.counts["sft_held_out"],
            "pairs": self.counts["pairs_train"],
            "pairs_held_out": self.counts["pairs_held_out"],
            "pairs_by_miner": {miner: self.pairs_by_miner[miner] for miner in self.config.preference.miners},
            "candidates_by_miner": {miner: self.candidates[miner] for miner in self.config.preference.miners},
            "dropped": _plain(self.dropped_samples + self.dropped_pairs),
            "repeated_turns": _plain(self.repeated_turns),
            "repeated_trajectories": self.repeated_trajectories,
            "sft_tokens": int(sum(self._lengths["sft: tokens in a sample"])),
            "sft_trimmed": self._trimmed_samples,
            "pair_tokens": int(
                2 * sum(self._lengths["pairs: tokens in the prompt"])
                + sum(self._lengths["pairs: tokens in chosen"])
                + sum(self._lengths["pairs: tokens in rejected"])
            ),
            "prompt_share": _mean(self._lengths["pairs: share of the prompt"]),
            "chosen_longer": self._chosen_longer / pairs if pairs else None,
        }

    def write(self, out_dir: Path, alike: Collection[tuple[str, str]] = ()) -> dict[str, Any]:
        """Write report.json and report.md, and give back the figures. `alike` are cases that a split keeps together
        (splits.grouping). Raises TraceForgeError where a case, or what must stay together with it, is found on both
        sides of what was written."""
        figures = self.figures()
        whole = {
            **figures,
            "dropped_samples": _plain(self.dropped_samples),
            "dropped_pairs": _plain(self.dropped_pairs),
            "lengths": {name: _quantiles(values) for name, values in self._lengths.items() if values},
            "length_bias": self._length_bias(),
            "split": prove_no_leak(out_dir, self.config, alike),
            "settings": self.config.model_dump(mode="json", exclude={"workers"}),  # they change nothing
        }
        (out_dir / "report.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
        (out_dir / "report.md").write_text(_markdown(whole), encoding="utf-8")
        return figures

    def _length_bias(self) -> dict[str, Any]:
        """Whether the chosen side is longer or shorter as a rule: then a model can learn length instead of substance.
        `ratio` is the geometric mean of scored tokens, chosen / rejected."""
        logs = self._lengths["pairs: log of scored chosen / rejected"]
        if not logs:
            return {}
        return {"chosen_longer": self._chosen_longer / len(logs), "ratio": math.exp(sum(logs) / len(logs))}


def prove_no_leak(out_dir: Path, config: DatasetsConfig, alike: Collection[tuple[str, str]] = ()) -> dict[str, Any]:
    """Read back which cases each file holds; what both sides share must be nothing. Also the trajectories: a run may
    be used twice on one side (as SFT samples and in pairs), never on both sides."""
    cases: dict[str, set[str]] = {"train": set(), "held_out": set()}
    trajectories: dict[str, set[str]] = {"train": set(), "held_out": set()}
    columns = {"sft": ["trajectory_id"], "preference": ["chosen_trajectory", "rejected_trajectory"]}
    for folder, names in columns.items():
        for side in cases:
            with pq.ParquetFile(out_dir / folder / f"{side}.parquet") as file:
                for batch in file.iter_batches(columns=["case", *names]):
                    cases[side].update(batch.column("case").to_pylist())
                    for name in names:
                        trajectories[side].update(batch.column(name).to_pylist())
    group_of = grouping(config.split, alike)
    groups = {side: {group_of(case) for case in names} for side, names in cases.items()}
    shared = groups["train"] & groups["held_out"] or trajectories["train"] & trajectories["held_out"]
    if shared:
        raise TraceForgeError(
            f"The split leaks: {', '.join(sorted(shared)[:5])} would be both trained on and held out. "
            "This is a fault in TraceForge; please report it with your configuration."
        )
    return {
        "by": config.split.by,
        **{f"cases_{side}": len(names) for side, names in cases.items()},
        **{f"groups_{side}": len(names) for side, names in groups.items()},
        "cases_on_both_sides": len(cases["train"] & cases["held_out"]),
        "groups_on_both_sides": 0,
        "trajectories_on_both_sides": 0,
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ranked = sorted(values)
    found = {f"p{round(100 * q)}": ranked[min(len(ranked) - 1, int(q * len(ranked)))] for q in QUANTILES}
    return {"count": len(ranked), "mean": sum(ranked) / len(ranked), **found}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _plain(counts: Counter[str]) -> dict[str, int]:
    return {reason: count for reason, count in sorted(counts.items()) if count}


def _markdown(whole: dict[str, Any]) -> str:
    lines = ["# Datasets", "", "| what | train | held out |", "| --- | --- | --- |"]
    lines.append(f"| SFT samples | {whole['sft_samples']} | {whole['sft_held_out']} |")
    lines.append(f"| pairs | {whole['pairs']} | {whole['pairs_held_out']} |")
    split = whole["split"]
    lines.append(f"| cases | {split['cases_train']} | {split['cases_held_out']} |")
    lines += ["", f"On both sides: {split['cases_on_both_sides']} cases, {split['groups_on_both_sides']} groups "]
    lines[-1] += f"(split by {split['by']}), {split['trajectories_on_both_sides']} trajectories."
    lines += ["", "| miner | candidates | pairs |", "| --- | --- | --- |"]
    for miner, count in whole["pairs_by_miner"].items():
        lines.append(f"| {miner} | {whole['candidates_by_miner'][miner]} | {count} |")
    if whole["length_bias"]:
        bias = whole["length_bias"]
        lines += [
            "",
            f"Length bias: the chosen side has more scored tokens in {bias['chosen_longer']:.0%} of the pairs; "
            f"chosen / rejected is {bias['ratio']:.2f} (geometric mean).",
        ]
    names = [f"p{round(100 * q)}" for q in QUANTILES]
    lines += ["", "| lengths | mean | " + " | ".join(names) + " |", "| --- " * (2 + len(names)) + "|"]
    for name, values in whole["lengths"].items():
        shown = [values["mean"], *(values[quantile] for quantile in names)]
        number = "{:.2f}" if "share" in name or "log" in name else "{:.0f}"
        lines.append(f"| {name} | " + " | ".join(number.format(value) for value in shown) + " |")
    if whole["repeated_turns"]:
        lines += ["", "| turns learnt in another trajectory, by format | count |", "| --- | --- |"]
        lines += [f"| {name} | {count} |" for name, count in whole["repeated_turns"].items()]
        lines += ["", f"Trajectories that are nothing but that: {whole['repeated_trajectories']}."]
    for what in ("samples", "pairs"):
        lines += ["", f"| {what} dropped | count |", "| --- | --- |"]
        lines += [f"| {reason} | {count} |" for reason, count in whole[f"dropped_{what}"].items()] or ["| none | 0 |"]
    return "\n".join(lines) + "\n"
