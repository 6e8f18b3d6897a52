"""How a run's files differ from the oracle's: the numbers that their formulas give, whatever way they are computed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from traceforge_core.comparison.deviations import deviations
from traceforge_core.comparison.parity import measure
from traceforge_core.comparison.rounding import rounding_of
from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.adapters import read_adapter
from traceforge_core.runs import write_json
from traceforge_core.training import sketch as sketches
from traceforge_core.training.records import StepRecord, append_record
from traceforge_core.training.sketch import SKETCH_SIZE, sketch

NAMES = [f"model.layers.{layer}.q_proj.lora_{side}.weight" for layer in (0, 1) for side in "AB"] + ["lm_head.lora_A"]
STEPS = 2
RATE = 1e-3
EXACT: dict[str, Any] = {"rel": 1e-12, "abs": 0}


def trained(folder: Path, seed: int) -> Path:
    """A run of two steps, some per mille from the others, whose adapter and gradients are on the disk."""
    base, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)

    def tensors(size: float) -> dict[str, torch.Tensor]:
        shapes = [(8, 40) if name.endswith("A.weight") else (40, 8) for name in NAMES]
        return {
            name: size * (torch.randn(shape, generator=base) + 3e-3 * torch.randn(shape, generator=own))
            for name, shape in zip(NAMES, shapes, strict=True)
        }

    (folder / "gradients").mkdir(parents=True)
    (folder / "adapter").mkdir()
    for step in range(1, STEPS + 1):
        gradient, weights = tensors(1e-5), tensors(0.02)
        record = StepRecord(step, 1.0 + seed / 1000, grad_norm=1e-3, learning_rate=RATE)
        record.weights_sketch, record.gradient_sketch = sketch(weights.items()), sketch(gradient.items())
        append_record(folder / "metrics.jsonl", record)
        save_file(gradient, folder / f"gradients/step-{step:05d}.safetensors")
    save_file(tensors(0.02), folder / "adapter/adapter_model.safetensors")
    write_json(folder / "training.json", {"start": {}, "backend": "transformers", "device": "cpu"})
    return folder


@pytest.fixture
def oracle(tmp_path: Path) -> Path:
    return trained(tmp_path / "oracle", 1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return trained(tmp_path / "run", 2)


def values(tensors: dict[str, torch.Tensor], names: list[str]) -> list[float]:
    return [value for name in names for value in tensors[name].flatten().tolist()]


def gradients(folder: Path, step: int, names: list[str] = NAMES) -> list[float]:
    from safetensors.torch import load_file

    return values(load_file(folder / f"gradients/step-{step:05d}.safetensors"), names)


def length(numbers: list[float]) -> float:
    return math.sqrt(math.fsum(x * x for x in numbers))


def apart(ours: list[float], theirs: list[float], factor: float = 1.0) -> float:
    return length([factor * a - b for a, b in zip(ours, theirs, strict=True)])


def test_gradients_and_adapters_differ_by_what_plain_sums_in_python_say(oracle: Path, run: Path) -> None:
    parity = measure(oracle, run)
    for step, found in enumerate(parity.steps, 1):
        ours, theirs = gradients(run, step), gradients(oracle, step)
        each = {name: (gradients(run, step, [name]), gradients(oracle, step, [name])) for name in NAMES}
        relative = {name: apart(*pair) / length(pair[1]) for name, pair in each.items()}
        worst = max(relative, key=relative.__getitem__)
        assert (found.gradient_parameter, found.gradient) == (worst, pytest.approx(relative[worst], **EXACT))
        assert found.gradient_overall == pytest.approx(apart(ours, theirs) / length(theirs), **EXACT)

        factor = length(theirs) / length(ours)
        turned = {name: apart(*pair, factor) / length(pair[1]) for name, pair in each.items()}
        worst = max(turned, key=turned.__getitem__)
        assert (found.direction_parameter, found.direction) == (worst, pytest.approx(turned[worst], **EXACT))
        assert rounding_of(oracle, [run])[step] == pytest.approx(turned, **EXACT)

        signs = [[g / (abs(g) + 1e-8) for g in numbers] for numbers in (ours, theirs)]
        way = RATE * apart(signs[0], signs[1])
        size = length(sketch_before(oracle, step)) / math.sqrt(SKETCH_SIZE)
        assert found.turned == pytest.approx(way / size, **EXACT)
    ours, theirs = (values(read_adapter(folder / "adapter"), NAMES) for folder in (run, oracle))
    assert parity.adapter == pytest.approx(apart(ours, theirs) / length(theirs), **EXACT)


def sketch_before(folder: Path, step: int) -> list[float]:
    from traceforge_core.training.records import read_records

    return read_records(folder / "metrics.jsonl")[step - 1].weights_sketch or []


def test_layers_and_adapters_deviate_by_what_plain_sums_in_python_say(oracle: Path, run: Path) -> None:
    found = deviations(oracle, run, STEPS)
    layers = {"layer 0": NAMES[:2], "layer 1": NAMES[2:4], "the rest": NAMES[4:]}
    assert found.layer_direction.keys() == found.layer_norm.keys() == layers.keys()
    for step in range(1, STEPS + 1):
        common = math.log(length(gradients(run, step)) / length(gradients(oracle, step)))
        for layer, names in layers.items():
            ours, theirs = gradients(run, step, names), gradients(oracle, step, names)
            product = math.fsum(a * b for a, b in zip(ours, theirs, strict=True))
            # 2 - 2·cosine of what is hardly turned: the subtraction itself costs digits.
            turned = 2 - 2 * product / (length(ours) * length(theirs))
            assert found.layer_direction[layer][step - 1] ** 2 == pytest.approx(turned, rel=0, abs=1e-14)
            stretched = math.log(length(ours) / length(theirs)) - common
            assert found.layer_norm[layer][step - 1] == pytest.approx(stretched, rel=0, abs=1e-14)
    final = [sketch(read_adapter(folder / "adapter").items()) for folder in (run, oracle)]
    moved = apart(final[1], sketch_before(oracle, 1))
    assert found.adapter[-1] == pytest.approx(apart(*final) / moved, **EXACT)
    assert found.moved[-1] == pytest.approx(math.log(apart(final[0], sketch_before(run, 1)) / moved), **EXACT)


def test_the_oracles_adapter_is_sketched_once_for_all_runs_and_again_when_it_is_another(
    oracle: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def counted(named: Any) -> list[float]:
        made.append(sketch(named))
        return made[-1]

    monkeypatch.setattr(sketches, "sketch", counted)
    first = deviations(oracle, run, STEPS)
    deviations(oracle, trained(tmp_path / "another", 3), STEPS)
    assert len(made) == 3

    weights = read_adapter(oracle / "adapter")
    (oracle / "adapter/adapter_model.safetensors").unlink()
    with pytest.raises(TraceForgeError, match="There is no adapter in"):
        deviations(oracle, run, STEPS)
    doubled = {name: 2 * tensor for name, tensor in weights.items()}
    save_file(doubled, oracle / "adapter/adapter_model.safetensors")
    assert deviations(oracle, run, STEPS).adapter[-1] != first.adapter[-1]
    assert len(made) == 4
