"""Real AdamW steps of torch, saved as a stage saves them, and taken again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from traceforge_core.comparison.parity import measure
from traceforge_core.comparison.replay import AdamW, replayed
from traceforge_core.comparison.tolerances import judge_exactly
from traceforge_core.config import ComparisonConfig
from traceforge_core.training.records import StepRecord, append_record, read_records
from traceforge_core.training.sketch import sketch

SHAPES = {"m.lora_A.weight": (8, 40), "m.lora_B.weight": (40, 8)}
STEPS = 4
USED = {"name": "adamw_torch", "betas": [0.9, 0.999], "epsilon": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}


def train(folder: Path, *, noise: float = 0.0, saved: int = STEPS, told: dict[str, Any] | None = None, **other: Any):
    """STEPS steps of torch's AdamW in float32 on gradients that are the same for every call but for `noise`, of sizes
    from 1e-12 to 1; `other` is what the optimizer is told beside what it should be."""
    (folder / "gradients").mkdir(parents=True)
    (folder / "adapter").mkdir()
    draw, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    used = USED | (told or {})
    weights = {name: torch.nn.Parameter(torch.randn(shape, generator=draw) / 40) for name, shape in SHAPES.items()}
    settings = {"lr": 1e-3, "betas": tuple(used["betas"]), "eps": used["epsilon"], "weight_decay": used["weight_decay"]}
    optimizer = torch.optim.AdamW(weights.values(), **(settings | other))
    for step in range(1, STEPS + 1):
        rate = 1e-3 * (1 - step / 10)
        for group in optimizer.param_groups:
            group["lr"] = rate * other.get("lr", 1e-3) / 1e-3
        for parameter in weights.values():
            sizes = 10 ** (-12 * torch.rand(parameter.shape, generator=draw))
            gradient = torch.randn(parameter.shape, generator=draw) * sizes
            parameter.grad = gradient + noise * torch.randn(parameter.shape, generator=own)
        if step <= saved:
            kept = {name: one.grad.clone() for name, one in weights.items() if one.grad is not None}
            save_file(kept, folder / f"gradients/step-{step:05d}.safetensors")
        record = StepRecord(step, 1.0, score_chosen=-1.0, score_rejected=-1.5, margin=1.0, learning_rate=rate)
        record.weights_sketch = sketch(weights.items())
        record.grad_norm = float(torch.nn.utils.clip_grad_norm_(weights.values(), used["max_grad_norm"] or 1e9))
        append_record(folder / "metrics.jsonl", record)
        optimizer.step()
    save_file({name: one.detach() for name, one in weights.items()}, folder / "adapter/adapter_model.safetensors")
    start = dict.fromkeys(("adapter", "data order", "tokenizer", "base weights"), "1")
    training = {"start": start, "dtype": "float32", "backend": "transformers", "device": "cpu", "optimizer": used}
    (folder / "training.json").write_text(json.dumps(training))
    return folder


def replay_of(oracle: Path, candidate: Path) -> Any:
    settings = AdamW.of(json.loads((oracle / "training.json").read_text()))
    records = (read_records(folder / "metrics.jsonl") for folder in (candidate, oracle))
    return replayed(oracle, candidate, settings, list(zip(*records, strict=True)))


@pytest.mark.parametrize(
    "told", [{}, {"weight_decay": 0.1}, {"max_grad_norm": 0.0}, {"betas": [0.8, 0.95], "epsilon": 1e-6}]
)
def test_a_right_optimizer_leaves_nothing_but_rounding_however_far_the_gradients_lead(
    told: dict[str, Any], tmp_path: Path
) -> None:
    oracle = train(tmp_path / "oracle", told=told)
    other = train(tmp_path / "other", told=told, noise=1e-4)
    assert measure(oracle, other).adapter > 1e-3  # signs of small entries turned
    replay = replay_of(oracle, other)
    assert list(replay.unexplained) == [2, 3, 4]
    assert max(replay.unexplained.values()) < 3e-7
    assert replay.final < 3e-7


@pytest.mark.parametrize(
    ("wrong", "step"),
    [({"betas": (0.9, 0.95)}, 3), ({"lr": 1.001e-3}, 2), ({"weight_decay": 0.1}, 2), ({"eps": 1e-6}, 2)],
)
def test_a_slightly_wrong_optimizer_is_found_where_noise_in_the_gradients_would_excuse_it(
    wrong: dict[str, Any], step: int, tmp_path: Path
) -> None:
    oracle = train(tmp_path / "oracle")
    other = train(tmp_path / "other", noise=1e-4, **wrong)
    replay = replay_of(oracle, other)
    assert replay.final > 1e-5
    assert min(at for at, value in replay.unexplained.items() if value > 1e-6) == step


def test_the_verdict_names_the_adapter_and_the_optimizer(tmp_path: Path) -> None:
    """Gradients are allowed here what they differ by, so that only the optimizer is left to be wrong."""
    oracle = train(tmp_path / "oracle")
    tolerances = ComparisonConfig(gradient_rtol=1e-2)
    right = judge_exactly(measure(oracle, train(tmp_path / "right", noise=1e-6)), tolerances)
    assert right.outcome == "pass"
    assert any(reason.startswith("final adapter beyond its own gradients") for reason in right.reasons)

    parity = measure(oracle, train(tmp_path / "wrong", noise=1e-6, betas=(0.9, 0.95)))
    verdict = judge_exactly(parity, tolerances)
    assert verdict.outcome == "fail" and verdict.first is not None
    assert (verdict.first.quantity, verdict.first.step) == ("adapter", 3)
    assert "from where AdamW leads with the run's own gradients" in verdict.reasons[0]
    assert "look at the optimizer" in verdict.reasons[0]


def test_gradients_of_the_first_steps_are_enough_for_the_first_steps(tmp_path: Path) -> None:
    oracle, other = (train(tmp_path / name, noise=noise, saved=2) for name, noise in (("oracle", 0.0), ("other", 1e-4)))
    replay = replay_of(oracle, other)
    assert list(replay.unexplained) == [2, 3]
    assert replay.final is None


def _another_optimizer(folder: Path) -> None:
    training = json.loads((folder / "training.json").read_text())
    (folder / "training.json").write_text(json.dumps(training | {"optimizer": USED | {"name": "adamw_8bit"}}))


def _an_older_stage(folder: Path) -> None:
    training = json.loads((folder / "training.json").read_text())
    del training["optimizer"]
    (folder / "training.json").write_text(json.dumps(training))


def _another_rate(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0]) | {"learning_rate": 1.0}
    (folder / "metrics.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")


def _other_weights(folder: Path) -> None:
    save_file({"m.lora_A.weight": torch.ones(8, 40)}, folder / "gradients/step-00001.safetensors")


@pytest.mark.parametrize("spoil", [_another_optimizer, _an_older_stage, _another_rate, _other_weights])
def test_where_there_is_not_enough_to_go_by_nothing_is_said(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    oracle = train(tmp_path / "oracle")
    spoil(oracle)
    assert replay_of(oracle, train(tmp_path / "other")) is None


def test_bfloat16_runs_are_not_replayed(tmp_path: Path) -> None:
    oracle = train(tmp_path / "oracle")
    training = json.loads((oracle / "training.json").read_text())
    (oracle / "training.json").write_text(json.dumps(training | {"dtype": "bfloat16"}))
    assert measure(oracle, train(tmp_path / "other")).unexplained is None
