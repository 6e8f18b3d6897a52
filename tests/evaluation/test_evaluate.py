"""The stage and its worker, with a real tiny model in a real process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from traceforge_core.config import RunConfig, load_config
from traceforge_core.errors import TraceForgeError
from traceforge_core.evaluation.evaluate import evaluate, evaluate_adapters, named_adapters
from traceforge_core.runs import Inputs, Run, StageResult, run_stage
from traceforge_core.stages import perform


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def config() -> RunConfig:
    return load_config(assignments=["evaluation.max_pairs=5", "evaluation.max_actions=4"])


def stage_with(adapter: Path, folder: Path) -> Path:
    shutil.copytree(adapter, folder / "adapter")
    return folder


@pytest.mark.slow
def test_every_model_of_a_run_is_measured_and_reported(
    config: RunConfig, tiny_model_dir: Path, tiny_datasets_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    inputs = {
        "model": tiny_model_dir,
        "datasets": tiny_datasets_dir,
        "sft": stage_with(make_adapter(scale=0.0), tmp_path / "sft"),
        "oracle": stage_with(make_adapter(1, scale=0.3, r=4), tmp_path / "oracle"),
        "branch_parallel": stage_with(make_adapter(2, scale=0.3), tmp_path / "branch_parallel"),
    }
    out = tmp_path / "evaluate"
    figures = evaluate(config, inputs, out)
    assert (figures["pairs"], figures["actions"]) == (5, 4)
    for figure in ("accuracy", "margin", "action_loss", "token_accuracy"):
        assert list(figures[figure]) == ["base", "sft", "oracle", "branch_parallel"]
        # An adapter whose B is zero is the base model; the others are not, and not each other.
        assert figures[figure]["sft"] == figures[figure]["base"]
    assert len(set(figures["action_loss"].values())) == len(set(figures["margin"].values())) == 3
    result = json.loads((out / "evaluation.json").read_text())
    assert result["held_out"] == {"pairs": 6, "actions": 9}
    scores = [json.loads(line) for line in (out / "scores.jsonl").read_text().splitlines()]
    assert len(scores) == 4 * (5 + 4)
    text = (out / "evaluation.md").read_text()
    assert "Pairs (5 of 6)" in text and "Next actions (4 of 9)" in text and "Branch-Parallel" in text
    assert (out / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "measured.json").exists()


@pytest.mark.slow
def test_the_figures_of_the_worker_are_those_of_the_adapter_loaded_by_peft(
    config: RunConfig, tiny_model_dir: Path, tiny_datasets_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from traceforge_core.evaluation import rows

    first, second = make_adapter(3, scale=0.3), make_adapter(4, scale=0.3)
    figures = evaluate_adapters(config, tiny_model_dir, tiny_datasets_dir, {"one": first, "two": second}, tmp_path)
    for name, adapter in (("one", first), ("two", second)):
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tiny_model_dir / "weights"), adapter
        ).eval()
        loss = tokens = 0.0
        for row in rows.read_rows(rows.actions_file(tiny_datasets_dir), rows.ACTION_COLUMNS, 4):
            count = sum(label != -100 for label in row["labels"])
            with torch.no_grad():
                mean = model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).loss
            loss, tokens = loss + mean.item() * count, tokens + count
        assert figures["action_loss"][name] == pytest.approx(loss / tokens, rel=1e-5)


def test_nothing_held_out_is_a_note_in_a_run_and_an_error_when_asked_for(
    config: RunConfig, tiny_model_dir: Path, tmp_path: Path
) -> None:
    empty, out = tmp_path / "datasets", tmp_path / "evaluate"
    empty.mkdir()
    out.mkdir()
    figures = evaluate(config, {"model": tiny_model_dir, "datasets": empty}, out)
    assert (figures["pairs"], figures["actions"]) == (0, 0)
    assert "datasets.split.held_out" in figures["note"]
    assert "Nothing was evaluated" in (out / "evaluation.md").read_text()
    with pytest.raises(TraceForgeError, match=r"datasets\.split\.held_out"):
        evaluate_adapters(config, tiny_model_dir, empty, {}, out)


def test_limits_that_leave_no_row_are_named(config: RunConfig, tiny_datasets_dir: Path, tmp_path: Path) -> None:
    config.evaluation.max_pairs = config.evaluation.max_actions = 0
    with pytest.raises(TraceForgeError, match=r"evaluation\.max_pairs"):
        evaluate_adapters(config, tmp_path, tiny_datasets_dir, {}, tmp_path)


def test_a_folder_without_an_adapter_is_named(config: RunConfig, tiny_datasets_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceForgeError, match=r"adapter_config\.json is missing"):
        evaluate_adapters(config, tmp_path, tiny_datasets_dir, {"mine": tmp_path}, tmp_path)
    with pytest.raises(TraceForgeError, match="cannot name an adapter"):
        evaluate_adapters(config, tmp_path, tiny_datasets_dir, {"base": tmp_path}, tmp_path)


@pytest.mark.slow
def test_an_adapter_of_another_model_is_refused_with_its_folder(
    config: RunConfig, tiny_model_dir: Path, tiny_datasets_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(make_adapter(), other)
    weights = load_file(other / "adapter_model.safetensors")
    save_file({name: tensor.repeat(1, 2) for name, tensor in weights.items()}, other / "adapter_model.safetensors")
    with pytest.raises(TraceForgeError, match=f"adapter in {other} cannot be put on this model"):
        evaluate_adapters(config, tiny_model_dir, tiny_datasets_dir, {"other": other}, tmp_path / "out")


@pytest.mark.slow
def test_data_of_another_tokenizer_is_refused(config: RunConfig, tiny_model_dir: Path, tmp_path: Path) -> None:
    from traceforge_core.datasets.parquet import SFT_SCHEMA, RowWriter

    with RowWriter(tmp_path / "data" / "sft" / "held_out.parquet", SFT_SCHEMA) as writer:
        texts = dict.fromkeys(("sample_id", "case", "trajectory_id", "prompt", "completion"), "x")
        writer.write(
            texts | {"turn": 1, "tokens": 2, "trimmed_messages": 0, "input_ids": [1, 9999], "labels": [-100, 9999]}
        )
    with pytest.raises(TraceForgeError, match="another model's tokenizer"):
        evaluate_adapters(config, tiny_model_dir, tmp_path / "data", {}, tmp_path / "out")


@pytest.mark.slow
def test_the_stage_runs_without_sft_and_is_reused(
    config: RunConfig, tiny_model_dir: Path, tiny_datasets_dir: Path, tmp_path: Path
) -> None:
    run = Run.create(tmp_path, "run")
    for name, source in (("model", tiny_model_dir), ("datasets", tiny_datasets_dir)):

        def copy(out_dir: Path, source: Path = source) -> dict:
            shutil.copytree(source, out_dir, dirs_exist_ok=True)
            return {}

        run_stage(run, name, {}, Inputs(), copy)
    first: StageResult = perform("evaluate", config, run)
    assert list(first.figures["accuracy"]) == ["base"]
    assert perform("evaluate", config, run).reused
    config.evaluation.max_pairs = 1
    assert not perform("evaluate", config, run).reused


def test_adapters_are_named_by_their_folder_unless_a_name_is_given(tmp_path: Path) -> None:
    given = [str(tmp_path / "run-1.5" / "adapter"), str(tmp_path / "mine"), f"other={tmp_path / 'mine'}"]
    assert named_adapters(given) == {
        "run-1_5": tmp_path / "run-1.5" / "adapter",
        "mine": tmp_path / "mine",
        "other": tmp_path / "mine",
    }
    with pytest.raises(TraceForgeError, match="Two adapters are named adapters"):
        named_adapters(["a/adapters", "b/adapters"])
