"""A page to look at the data of a run with: one HTML file that needs nothing else.

    write_data_page(run_path, Path("data.html"))

Shows what was read (by format, outcome and exit), lengths against the limits, what was dropped and why, and samples and
pairs as the model sees them: every token of the loss coloured, and a mark where messages were left out.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from traceforge_core.datasets.budget import spread
from traceforge_core.datasets.histogram import histogram
from traceforge_core.datasets.token_text import Stretch, stretches
from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.chat import ChatRenderer, load_renderer
from traceforge_core.runs import not_written, write_text

SHOWN_SAMPLES = 40
SHOWN_PAIRS = 24
SIDES = ("train", "held_out")
NAMES = {"train": "training", "held_out": "held out"}


def write_data_page(run_path: Path, out_file: Path) -> Path:
    """Write the page of a run whose stages ingest, model and datasets are finished; returns `out_file`.

    Raises TraceForgeError naming the stage that is missing.
    """
    ingest = _read_report(run_path, "ingest")
    datasets = _read_report(run_path, "datasets")
    if not (run_path / "model" / "tokenizer").is_dir():
        raise _missing(run_path, "model")
    renderer = load_renderer(run_path / "model")
    folder = run_path / "datasets"
    settings = datasets["settings"]
    title = html.escape(f"Data of run {run_path.resolve().name}")
    parts = {
        "TITLE": title,
        "HEADING": title,
        "COUNTS": _headline(ingest, datasets),
        "READ": "".join(
            [
                _bars("Format", ingest.get("by_format", {})),
                _bars("Outcome", ingest.get("by_outcome", {})),
                _bars("How runs ended", ingest.get("by_exit", {})),
                _bars("Set aside", ingest.get("by_reason", {}), none="Nothing was set aside."),
                _bars("Left out of runs", ingest.get("left_out", {}), none="Nothing was left out."),
            ]
        ),
        "LENGTHS": "".join(_histograms(folder, settings)),
        "DROPPED": _bars("SFT samples", datasets["dropped_samples"], none="No sample was dropped.")
        + _bars("Pairs", datasets["dropped_pairs"], none="No pair was dropped.")
        + _bars("Turns learnt in another trajectory", datasets.get("repeated_turns", {}), none="No turn is in two."),
        "SPLIT": _split(datasets),
        "DATA": _embedded({"samples": _samples(folder, renderer), "pairs": _pairs(folder, renderer)}),
    }
    page = (resources.files("traceforge_core.datasets") / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        before, _, after = page.partition(f"<!--{name}-->")
        page = before + text + after
    try:
        out_file.parent.mkdir(parents=True, exist_ok=True)
        write_text(out_file, page)
    except OSError as error:
        raise not_written(error, f"write {out_file}", "Name another file with --out.") from None
    return out_file


def _read_report(run_path: Path, stage: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((run_path / stage / "report.json").read_text(encoding="utf-8"))
        return content
    except (OSError, ValueError):
        raise _missing(run_path, stage) from None


def _missing(run_path: Path, stage: str) -> TraceForgeError:
    return TraceForgeError(
        f"The run {run_path} has no finished stage {stage}, which the data page needs. Run it first: "
        "traceforge run --stages ingest,model,datasets."
    )


def _headline(ingest: dict[str, Any], datasets: dict[str, Any]) -> str:
    numbers = [
        (f"{ingest['found']:,}", "trajectories found"),
        (f"{ingest['read']:,}", "read"),
        (f"{ingest['quarantined']:,}", "set aside"),
        (f"{ingest['duplicates']:,}", "duplicates"),
        (f"{datasets['sft_samples']:,}", f"SFT samples (+ {datasets['sft_held_out']:,} held out)"),
        (f"{datasets['pairs']:,}", f"pairs (+ {datasets['pairs_held_out']:,} held out)"),
    ]
    return "".join(f"<div class=number><b>{value}</b><span>{name}</span></div>" for value, name in numbers)


def _bars(title: str, counts: dict[str, int], none: str = "None.") -> str:
    """A titled table with a bar for each count, largest first."""
    rows = []
    largest = max(counts.values(), default=1) or 1
    for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        rows.append(
            f"<tr><th scope=row>{html.escape(str(name).replace('_', ' '))}</th><td class=count>{count:,}</td>"
            f'<td class=bar><i style="width:{100 * count / largest:.1f}%"></i></td></tr>'
        )
    body = f"<table>{''.join(rows)}</table>" if rows else f"<p>{none}</p>"
    return f"<section class=card><h3>{html.escape(title)}</h3>{body}</section>"


def _split(datasets: dict[str, Any]) -> str:
    split = datasets["split"]
    text = (
        f"Split by {split['by']}: {split['cases_train']} cases are trained on, {split['cases_held_out']} are held out; "
        f"read back from the files, {split['cases_on_both_sides']} cases and {split['trajectories_on_both_sides']} "
        "trajectories are on both sides."
    )
    bias = datasets["length_bias"]
    if bias:
        text += (
            f" The chosen side is the longer one in {bias['chosen_longer']:.0%} of the pairs, and has "
            f"{bias['ratio']:.2f} times the rejected side's scored tokens (geometric mean)."
        )
    return html.escape(text)


def _histograms(folder: Path, settings: dict[str, Any]) -> list[str]:
    samples = _columns(folder / "sft", {"tokens": lambda batch: batch["tokens"], "loss": _learned_tokens})
    lengths = {name: _list_lengths(name) for name in ("prompt_ids", "chosen_ids", "rejected_ids")}
    scored = {name: _ones(name) for name in ("chosen_mask", "rejected_mask")}
    pairs = _columns(folder / "preference", {**lengths, **scored})
    longest = pairs["prompt_ids"] + np.maximum(pairs["chosen_ids"], pairs["rejected_ids"])
    both = 2 * pairs["prompt_ids"] + pairs["chosen_ids"] + pairs["rejected_ids"]
    share = 200 * pairs["prompt_ids"] / np.maximum(both, 1)
    return [
        histogram("Tokens in an SFT sample", samples["tokens"], limit=settings["sft"]["max_length"]),
        histogram("Tokens in the loss of an SFT sample", samples["loss"]),
        histogram("Tokens in the longer branch of a pair", longest, limit=settings["preference"]["max_length"]),
        histogram("Scored tokens, chosen", pairs["chosen_mask"]),
        histogram("Scored tokens, rejected", pairs["rejected_mask"]),
        histogram("Share of a pair's tokens that is prompt, %", share),
    ]


def _columns(folder: Path, measures: dict[str, Any]) -> dict[str, Any]:
    """Numbers of all rows of both sides, a batch in memory at a time."""
    found: dict[str, list[Any]] = {name: [np.zeros(0)] for name in measures}
    for side in SIDES:
        with pq.ParquetFile(folder / f"{side}.parquet") as file:
            for batch in file.iter_batches(batch_size=256):
                for name, measure in measures.items():
                    found[name].append(np.asarray(measure(batch), dtype=float))
    return {name: np.concatenate(values) for name, values in found.items()}


def _list_lengths(name: str) -> Any:
    return lambda batch: pc.list_value_length(batch[name])


def _ones(name: str) -> Any:
    return lambda batch: [int(np.sum(row.values.to_numpy(zero_copy_only=False))) for row in batch[name]]


def _learned_tokens(batch: pa.RecordBatch) -> list[int]:
    return [int(np.sum(row.values.to_numpy() >= 0)) for row in batch["labels"]]


def _samples(folder: Path, renderer: ChatRenderer) -> list[dict[str, Any]]:
    shown = []
    for side, row in _some_rows(folder / "sft", SHOWN_SAMPLES):
        learned = [label >= 0 for label in row["labels"]]
        shown.append(
            {
                "name": row["sample_id"],
                "facts": _facts(
                    case=row["case"],
                    side=NAMES[side],
                    tokens=row["tokens"],
                    in_the_loss=sum(learned),
                    messages_left_out=row["trimmed_messages"],
                ),
                "text": stretches(renderer.tokenizer, row["input_ids"], learned),
            }
        )
    return shown


def _pairs(folder: Path, renderer: ChatRenderer) -> list[dict[str, Any]]:
    shown = []
    for side, row in _some_rows(folder / "preference", SHOWN_PAIRS):
        branches: dict[str, list[Stretch]] = {}
        for branch in ("chosen", "rejected"):
            mask = [mark == 1 for mark in row[f"{branch}_mask"]]
            branches[branch] = stretches(renderer.tokenizer, row[f"{branch}_ids"], mask)
        shown.append(
            {
                "name": row["pair_id"],
                "facts": _facts(
                    case=row["case"],
                    side=NAMES[side],
                    miner=row["miner"],
                    prompt=len(row["prompt_ids"]),
                    chosen=f"{len(row['chosen_ids']):,} tokens, {sum(row['chosen_mask']):,} scored",
                    rejected=f"{len(row['rejected_ids']):,} tokens, {sum(row['rejected_mask']):,} scored",
                ),
                "text": stretches(renderer.tokenizer, row["prompt_ids"], [False] * len(row["prompt_ids"])),
                **branches,
            }
        )
    return shown


def _facts(**facts: Any) -> list[list[str]]:
    return [
        [name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value)]
        for name, value in facts.items()
    ]


def _some_rows(folder: Path, count: int) -> list[tuple[str, dict[str, Any]]]:
    """At most `count` rows, spread over both sides; three of four from training where there are enough."""
    rows = []
    for side, share in zip(SIDES, (count - count // 4, count // 4), strict=True):
        with pq.ParquetFile(folder / f"{side}.parquet") as file:
            wanted = spread(file.metadata.num_rows, share)
            number = 0
            for batch in file.iter_batches(batch_size=64):
                picked = [position for position in range(batch.num_rows) if wanted(number + position)]
                rows += [(side, row) for row in batch.take(pa.array(picked, pa.int32())).to_pylist()]
                number += batch.num_rows
    return rows


def _embedded(data: dict[str, Sequence[Any]]) -> str:
    """JSON that may stand inside a script element, whatever texts it holds."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
