"""`traceforge plan`, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_plan_says_what_a_length_costs_without_loading_anything(tmp_path: Path) -> None:
    shape = {
        "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 12_288, "vocab_size": 151_936, "model_type": "qwen3",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    command = [sys.executable, "-m", "flows.cli", "plan", str(tmp_path), "--gpu-gib", "24", "--json"]
    command += [
        "--set",
        "model.quantization=nf4",
        "--set",
        "model.dtype=bfloat16",
        "--plot",
        str(tmp_path / "plan.png"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["strategy"] == "shared_prefix"
    assert 10 < figures["work"][0]["peak_gib"] < 13
    assert (tmp_path / "plan.png").exists()
    lost = subprocess.run(
        [*command[:4], str(tmp_path / "none" / "config.json")], capture_output=True, text=True, timeout=60
    )
    assert lost.returncode == 1 and "cannot be read" in lost.stderr
