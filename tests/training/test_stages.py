"""The training stages with real workers: what they leave behind, and that Branch-Parallel computes what TRL does."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceforge_core.comparison.compare import compare
from traceforge_core.comparison.parity import Parity, measure
from traceforge_core.config import RunConfig, load_config
from traceforge_core.errors import TraceForgeError
from traceforge_core.training import stages
from traceforge_core.training.pair_trainer import TRACKED
from traceforge_core.training.records import read_records

Configure = Callable[..., RunConfig]


@pytest.mark.slow
def test_sft_then_oracle_then_branch_parallel_agree_in_float32(
    inputs: dict[str, Path], configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = configure(comparison__gradient_steps=6, model__trust_remote_code=True)
    with caplog.at_level(logging.INFO, logger="traceforge_core"):
        sft = stages.train_sft(config, inputs, tmp_path / "sft")
        trained = inputs | {"sft": tmp_path / "sft"}
        stages.train_oracle(config, trained, tmp_path / "oracle")
        figures = stages.train_branch_parallel(config, trained, tmp_path / "branch_parallel")

    assert sft["steps"] == 6 and sft["last_loss"] != sft["first_loss"]
    assert figures["workers"] == 2 and figures["transport"] == "gloo"
    assert "step 6/6" in caplog.text  # progress reaches the caller's log

    parity = measure(tmp_path / "oracle", tmp_path / "branch_parallel")
    assert parity.unequal == []
    assert parity.gradient_steps == 6
    assert parity.max_loss <= 1e-6
    assert parity.max_gradient is not None and parity.max_gradient <= 1e-5
    assert parity.adapter <= 1e-5

    result = compare(
        config,
        {"oracle": tmp_path / "oracle", "branch_parallel": tmp_path / "branch_parallel"},
        _folder(tmp_path / "compare"),
    )
    assert result["verdict"] == "pass"
    assert result["branch_parallel"]["steps"] == 6
    assert (tmp_path / "compare" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "was allowed to run (`model.trust_remote_code`)" in (tmp_path / "compare" / "report.md").read_text()

    folder = tmp_path / "branch_parallel"
    assert not (folder / "checkpoints").exists()
    assert len(list((folder / "gradients").iterdir())) == 6
    assert (folder / "logs" / "rank1.log").read_text()
    start = json.loads((folder / "training.json").read_text())["start"]
    assert start["adapter"] == json.loads((tmp_path / "oracle" / "training.json").read_text())["start"]["adapter"]
    for record in read_records(folder / "metrics.jsonl"):
        assert record.margin == pytest.approx(2.0 * (record.score_chosen - record.score_rejected), abs=1e-6)
        assert record.seconds and record.tokens and record.peak_memory_mib and record.grad_norm
        assert 0 < record.exchange_seconds < record.seconds


@pytest.mark.slow
def test_where_the_oracle_cannot_hold_whole_pairs_cut_ones_are_compared_and_whole_ones_trained(
    inputs: dict[str, Path], configure: Configure, tmp_path: Path
) -> None:
    config = configure(comparison__oracle_max_length=24, comparison__oracle_steps=3, comparison__gradient_steps=3)
    stages.train_oracle(config, inputs, tmp_path / "oracle")
    stages.train_branch_parallel(config, inputs, tmp_path / "branch_parallel")

    oracle, strategy = (read_records(tmp_path / name / "metrics.jsonl") for name in ("oracle", "branch_parallel"))
    micro_batches = config.preference.batch_size * config.preference.gradient_accumulation
    assert len(oracle) == 3 and all(record.tokens <= 2 * 24 * micro_batches for record in oracle if record.tokens)
    assert len(strategy) == 6 and max(record.tokens for record in strategy if record.tokens) > 2 * 24
    result = compare(
        config,
        {"oracle": tmp_path / "oracle", "branch_parallel": tmp_path / "branch_parallel"},
        _folder(tmp_path / "compare"),
    )
    assert result["verdict"] == "pass"
    assert result["branch_parallel"]["steps"] == 3


@pytest.mark.slow
def test_a_saved_adapter_loads_with_peft(inputs: dict[str, Path], configure: Configure, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    stages.train_sft(configure(sft__max_steps=1), inputs, tmp_path / "sft")
    base = AutoModelForCausalLM.from_pretrained(inputs["model"] / "weights")
    model = PeftModel.from_pretrained(base, str(tmp_path / "sft" / "adapter"))
    moved = [name for name, parameter in model.named_parameters() if ".lora_B." in name and bool(parameter.any())]
    assert len(moved) == 14  # seven projections in each of two layers


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"cpo_alpha": 0.3, "label_smoothing": 0.1}, id="with the NLL term and label smoothing"),
        pytest.param({"batch_size": 3, "gradient_accumulation": 2, "epochs": 2, "max_steps": None}, id="batches"),
        pytest.param({"max_grad_norm": 0.0, "gradient_checkpointing": False}, id="never clipped, no checkpointing"),
        pytest.param({"max_grad_norm": 0.05, "warmup_steps": 2, "schedule": "linear"}, id="clipped at every step"),
    ],
)
def test_branch_parallel_agrees_with_the_oracle(
    changes: dict, inputs: dict[str, Path], configure: Configure, tmp_path: Path
) -> None:
    config = configure(**{f"preference__{name}": value for name, value in changes.items()})
    assert_agree(config, inputs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [14, 13, 9], ids=["even", "one short", "one replica idle in the last step"])
def test_two_replicas_equal_one_with_twice_the_accumulation(
    pairs: int, inputs: dict[str, Path], configure: Configure, tmp_path: Path, make_datasets: Callable[[int], Path]
) -> None:
    config = configure(
        preference__replicas=2,
        preference__epochs=2,
        preference__max_steps=None,
        preference__cpo_alpha=0.3,
        preference__report_to=["tensorboard"],
    )
    figures = assert_agree(config, inputs | {"datasets": make_datasets(pairs)}, tmp_path)
    assert figures["workers"] == 4
    assert figures["steps"] == 2 * -(-pairs // 4)
    tracked = [tensorboard_scalars(tmp_path / name) for name in ("oracle", "branch_parallel")]
    for name in ("loss", "grad_norm", "learning_rate", *TRACKED):
        theirs, ours = ({event.step: event.value for event in each[f"train/{name}"]} for each in tracked)
        assert len(ours) == figures["steps"] and ours == pytest.approx(theirs, rel=1e-4, abs=1e-5), name


@pytest.fixture(scope="module")
def eight_pairs_a_step(
    model_dir: Path, datasets_dir: Path, sft_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Trains three steps of eight pairs each with a strategy, on so many replicas. Pairs run out in the second step, so
    that some replicas have nothing to do in it."""
    folder = tmp_path_factory.mktemp("eight")
    inputs = {"model": model_dir, "datasets": datasets_dir, "sft": sft_dir}

    def train(strategy: str, replicas: int) -> Path:
        out = folder / f"{strategy}-{replicas}"
        if not out.exists():
            config = load_config(
                assignments=[
                    "model.device=cpu",
                    "preference.max_steps=3",
                    "preference.learning_rate=0.001",
                    f"preference.replicas={replicas}",
                    f"preference.gradient_accumulation={8 // replicas}",
                    "comparison.gradient_steps=3",
                ]
            )
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("OMP_NUM_THREADS", "1")
                getattr(stages, f"train_{strategy}")(config, inputs, out)
        return out

    return train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "replicas", "workers"),
    [
        pytest.param("branch_parallel", 4, 8, id="four pairs in flight on eight workers"),
        pytest.param("shared_prefix", 4, 4, id="four pairs in flight on four workers"),
    ],
)
def test_many_workers_end_with_the_adapter_of_two_that_accumulate_the_same_pairs(
    strategy: str, replicas: int, workers: int, eight_pairs_a_step: Callable[..., Path]
) -> None:
    two, many = eight_pairs_a_step("branch_parallel", 1), eight_pairs_a_step(strategy, replicas)
    told = [json.loads((folder / "training.json").read_text())["workers"] for folder in (two, many)]
    assert told == [2, workers]
    parity = measure(two, many)
    assert len(parity.steps) == parity.gradient_steps == 3
    assert_within_float32(parity)


@pytest.mark.slow
def test_held_out_pairs_are_evaluated_before_and_after_alike(
    inputs: dict[str, Path], configure: Configure, tmp_path: Path
) -> None:
    config = configure(preference__evaluate=True, preference__max_steps=2)
    oracle = stages.train_oracle(config, inputs, tmp_path / "oracle")["held_out"]
    other = stages.train_branch_parallel(config, inputs, tmp_path / "branch_parallel")["held_out"]
    for when in ("before", "after"):
        for name in ("loss", "rewards/accuracies", "rewards/margins"):
            assert other[when][name] == pytest.approx(oracle[when][name], abs=2e-6)
    assert oracle["before"]["loss"] != oracle["after"]["loss"]


def test_two_gpus_asked_for_and_one_there_is_said_before_anything_starts(
    inputs: dict[str, Path], configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traceforge_core.training.stages.visible_gpus", lambda: ["0"])
    monkeypatch.setattr("traceforge_core.training.seats.visible_gpus", lambda: ["0"])
    with pytest.raises(TraceForgeError, match=r"needs 2 GPUs, one a worker, and 1 can be used"):
        stages.train_branch_parallel(configure(model__device="cuda"), inputs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_optimizer_that_cannot_run_here_is_said_before_anything_starts(
    inputs: dict[str, Path], configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(preference__optimizer="adamw_8bit")
    with pytest.raises(TraceForgeError, match=r"preference\.optimizer adamw_8bit needs a CUDA GPU.*adamw_torch"):
        stages.run_job(stages.preference_job("branch_parallel", config, inputs, tmp_path / "out"))
    stages.require_machine(["sft"], config)
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else there(name))
    monkeypatch.setattr("traceforge_core.training.stages.visible_gpus", lambda: ["0"])
    with pytest.raises(TraceForgeError, match=r"adamw_8bit needs bitsandbytes, which is not installed"):
        stages.require_machine(["oracle"], configure(preference__optimizer="adamw_8bit", model__device="cuda"))
    assert not (tmp_path / "out").exists()


def test_every_batch_that_is_evaluated_is_a_sign_of_life(
    inputs: dict[str, Path], configure: Configure, tmp_path: Path
) -> None:
    from traceforge_core.training.mesh import Mesh
    from traceforge_core.training.pair_trainer import PairTrainer
    from traceforge_core.training.preference import train

    config = configure(preference__evaluate=True, preference__max_steps=1)
    job = stages.preference_job("oracle", config, inputs, tmp_path / "out")
    job.out_dir.mkdir()
    beats: list[str] = []
    train(job, Mesh(), PairTrainer, beats.append)
    assert beats.count("evaluating") >= 2 * 4  # held-out pairs, before and after


def test_cuda_without_a_gpu_says_what_to_do(
    inputs: dict[str, Path], configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(TraceForgeError, match=r"Set model.device to cpu or auto"):
        stages.train_oracle(configure(model__device="cuda"), inputs, tmp_path / "out")
    with pytest.raises(TraceForgeError, match=r"nf4 needs a CUDA GPU"):
        stages.train_oracle(configure(model__quantization="nf4"), inputs, tmp_path / "out")


@pytest.mark.slow
def test_a_model_path_that_does_not_exist_is_named(
    inputs: dict[str, Path], configure: Configure, tmp_path: Path
) -> None:
    folder = _folder(tmp_path / "model")
    (folder / "model.json").write_text(json.dumps({"name": "x", "weights": str(tmp_path / "nowhere")}))
    (folder / "tokenizer").symlink_to(inputs["model"] / "tokenizer")
    with pytest.raises(TraceForgeError, match=r"Cannot load the model .*nowhere"):
        stages.train_oracle(configure(), inputs | {"model": folder}, tmp_path / "out")


def assert_agree(config: RunConfig, inputs: dict[str, Path], folder: Path) -> dict:
    """Train with both; every step's loss, gradients and the final adapters must agree in float32."""
    stages.train_oracle(config, inputs, folder / "oracle")
    figures = stages.train_branch_parallel(config, inputs, folder / "branch_parallel")
    parity = measure(folder / "oracle", folder / "branch_parallel")
    assert parity.gradient_steps >= min(5, len(parity.steps))
    assert_within_float32(parity)
    return figures


def assert_within_float32(parity: Parity) -> None:
    print(f"loss {parity.max_loss:.2g} gradient {parity.max_gradient:.2g} adapter {parity.adapter:.2g}")
    assert parity.unequal == []
    assert all(step.data is None for step in parity.steps)
    assert parity.max_loss <= 1e-6
    assert parity.max_score <= 2e-6
    assert parity.max_gradient is not None and parity.max_gradient <= 1e-5
    assert parity.adapter <= 1e-5


def tensorboard_scalars(folder: Path) -> dict[str, list[Any]]:
    """Every scalar that a training outside a run told TensorBoard, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [file] = folder.rglob("events.out.*")
    events = EventAccumulator(str(file.parent))
    events.Reload()
    return {name: events.Scalars(name) for name in events.Tags()["scalars"]}


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path
