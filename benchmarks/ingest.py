"""How fast, and in how much memory, a large corpus is read.

    python benchmarks/ingest.py --gigabytes 2 --workers 2

Writes a corpus of mini-swe-agent v1 and v2 files, chat rows (JSON Lines) and packed files into a temporary folder,
reads it, and deletes it. Printed: MB of JSON a second by the clock and by processor time (which other programs on the
machine do not change), and the highest memory of all processes together. `--json` prints one JSON object. Text comes
from Python's own library, so that it looks like what agents read.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import orjson
import psutil

from traceforge_core.config import load_config
from traceforge_core.trajectories.ingest import ingest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the corpus, unpacked")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1, help="measure so often; every figure is printed")
    parser.add_argument("--folder", type=Path, default=None, help="where to put the corpus (default: the system's)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="ingest-benchmark-") as name:
        corpus = Path(name, "corpus")
        written, trajectories = write_corpus(corpus, int(options.gigabytes * 1e9))
        runs = [measure(corpus, Path(name, f"out-{i}"), options.workers, written) for i in range(options.repeat)]
    for run in runs:
        if run["read"] != trajectories:
            sys.exit(f"{trajectories} trajectories written, {run['read']} read")
    if options.json:
        print(json.dumps({"bytes": written, "trajectories": trajectories, "workers": options.workers, "runs": runs}))
        return
    print(f"{written / 1e9:.2f} GB of JSON, {trajectories} trajectories, {options.workers} workers")
    for run in runs:
        print(
            f"{run['seconds']:.1f} s, {run['megabytes_per_second']:.1f} MB/s "
            f"({run['megabytes_per_cpu_second']:.1f} MB a processor second), "
            f"peak memory {run['peak_memory_mib']} MiB (this process alone {run['peak_memory_of_parent_mib']} MiB)"
        )


def measure(corpus: Path, out: Path, workers: int, written: int) -> dict[str, Any]:
    """One ingest: seconds, throughput, and the highest resident memory of this process and its children together."""
    out.mkdir()
    config = load_config(assignments=[f"ingest.path={json.dumps(str(corpus))}", f"ingest.workers={workers}"])
    stop, peaks = threading.Event(), {"all": 0, "parent": 0}
    watcher = threading.Thread(target=watch_memory, args=(stop, peaks), daemon=True)
    watcher.start()
    clock, before = time.perf_counter(), os.times()
    figures = ingest(config, {}, out)
    seconds, after = time.perf_counter() - clock, os.times()
    cpu = sum(after[:4]) - sum(before[:4])
    stop.set()
    watcher.join()
    return {
        "seconds": round(seconds, 2),
        "megabytes_per_second": round(written / 1e6 / seconds, 1),
        "cpu_seconds": round(cpu, 2),
        "megabytes_per_cpu_second": round(written / 1e6 / cpu, 1),
        "peak_memory_mib": peaks["all"] >> 20,
        "peak_memory_of_parent_mib": peaks["parent"] >> 20,
        "read": figures["read"],
        "shards": figures["shards"],
    }


def watch_memory(stop: threading.Event, peaks: dict[str, int]) -> None:
    """Note under `all` and `parent`, until told to stop, the most bytes that all processes and this one alone hold."""
    me = psutil.Process()
    while not stop.wait(0.05):
        own = total = me.memory_info().rss
        for child in me.children(recursive=True):
            try:
                total += child.memory_info().rss
            except psutil.Error:
                continue
        peaks["all"], peaks["parent"] = max(peaks["all"], total), max(peaks["parent"], own)


def write_corpus(folder: Path, size: int) -> tuple[int, int]:
    """Write a corpus of about `size` bytes of JSON. Returns (bytes before packing, trajectories)."""
    source = [
        path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(Path(json.__file__).parent.parent.glob("*.py"))
    ]
    text = "\n".join(source)
    draw = random.Random(0)
    written = count = 0
    rows: list[bytes] = []
    while written < size:
        case, run = f"project__case-{count // 8}", f"run-{count % 8}"
        kind = count % 4
        if kind == 3:
            rows.append(orjson.dumps(_chat_row(draw, text, case, run)) + b"\n")
            data = rows[-1]
            if len(rows) == 64:
                _append(folder / "rows" / f"rows-{count:07d}.jsonl", rows)
        else:
            data = orjson.dumps(_mini(draw, text, case, kind + 1 if kind < 2 else 2), option=orjson.OPT_INDENT_2)
            path = folder / run / case / f"{case}.traj.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == 2 and count % 40 == 2:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(data, 1))
            else:
                path.write_bytes(data)
        written += len(data)
        count += 1
    _append(folder / "rows" / "rows-last.jsonl", rows)
    return written, count


def _append(path: Path, rows: list[bytes]) -> None:
    if rows:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(rows))
        rows.clear()


def _mini(draw: random.Random, text: str, case: str, version: int) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a helpful assistant that can interact with a computer shell."},
        {"role": "user", "content": f"Solve {case}.\n" + _piece(draw, text, 4000)},
    ]
    for turn in range(draw.randint(20, 60)):
        thought, seen, command = _piece(draw, text, 400), _piece(draw, text, 6000), f"sed -n {turn},99p src/module.py"
        observation = f"<returncode>0</returncode>\n<output>\n{seen}</output>"
        if version == 1:
            content = f"THOUGHT: {thought}\n\n```bash\n{command}\n```"
            response = {
                "choices": [{"message": {"role": "assistant", "content": content}}],
                "usage": {"total_tokens": 9},
            }
            messages.append({"role": "assistant", "content": content, "extra": {"response": response}})
            messages.append({"role": "user", "content": observation})
            continue
        call = {
            "id": f"call_{turn}",
            "type": "function",
            "function": {"name": "bash", "arguments": json.dumps({"command": command})},
        }
        answer = {"role": "assistant", "content": thought, "tool_calls": [call], "reasoning_content": thought[::-1]}
        extra = {
            "actions": [{"command": command, "tool_call_id": call["id"]}],
            "response": {"choices": [{"message": answer}]},
        }
        messages.append({**answer, "extra": extra})
        messages.append(
            {
                "role": "tool",
                "content": observation,
                "tool_call_id": call["id"],
                "extra": {"raw_output": seen, "returncode": 0},
            }
        )
    patch = _piece(draw, text, 2000)
    messages.append({"role": "user", "content": patch} if version == 1 else {"role": "exit", "content": patch})
    return {
        "info": {"exit_status": "Submitted", "submission": patch, "config": {"model": {"model_name": "m"}}},
        "messages": messages,
        "trajectory_format": "mini-swe-agent-1" if version == 1 else "mini-swe-agent-1.1",
        "instance_id": case,
    }


def _chat_row(draw: random.Random, text: str, case: str, run: str) -> dict[str, Any]:
    value = _mini(draw, text, case, 2)
    keep = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content")
    messages = [{key: m[key] for key in keep if key in m} for m in value["messages"] if m["role"] != "exit"]
    return {"instance_id": case, "run_id": run, "resolved": draw.random() < 0.5, "messages": messages}


def _piece(draw: random.Random, text: str, length: int) -> str:
    start = draw.randrange(len(text) - length)
    return text[start : start + draw.randint(length // 4, length)]


if __name__ == "__main__":
    main()
