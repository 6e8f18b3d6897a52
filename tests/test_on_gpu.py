"""What only a GPU can show: the doctor's trials, memory that really runs out, evaluation and export there."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from traceforge_core.config import load_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = ["model.device=cuda", "model.dtype=bfloat16"]


def test_the_doctor_finds_the_gpu_and_what_works_on_it(tmp_path: Path) -> None:
    from traceforge_core.doctor.examine import examine
    from traceforge_core.doctor.report import render

    checkup = examine(tmp_path)
    print(render(checkup))
    found = {finding.subject: finding for finding in checkup.findings}
    assert found["GPU 0"].figures["name"] == torch.cuda.get_device_name(0)
    for subject in ("torch works", "bf16 products", "pinned memory", "attention: flash", "attention: math"):
        assert found[subject].status == "ok", found[subject]
    for subject, package in (("NF4", "bitsandbytes"), ("unsloth", "unsloth")):
        assert (found[subject].status == "not tried") == (importlib.util.find_spec(package) is None), found[subject]


def test_memory_that_runs_out_names_its_part_and_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from traceforge_core.training.job import Job
    from traceforge_core.training.launch import launch
    from traceforge_core.training.seats import visible_gpus
    from traceforge_core.training.watch import WorkerError

    code = "import torch\ndef work(job, beat):\n    beat('at step 2')\n    torch.empty(2**50, device='cuda')\n"
    (tmp_path / "planted.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    job = Job("evaluate", "planted:work", load_config(), tmp_path, tmp_path, tmp_path / "out", device="cuda")
    with pytest.raises(WorkerError, match=r"GPU memory ran out, at step 2 .*docs/errors/out-of-memory\.md"):
        launch(job, visible_gpus()[:1])


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_figures_in_bf16_are_those_of_float32_but_for_rounding(
    quantization: str, tiny_model_dir: Path, tiny_datasets_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    from traceforge_core.evaluation.evaluate import evaluate_adapters

    if quantization == "nf4":
        pytest.importorskip("bitsandbytes")
    adapters = {"tuned": make_adapter(scale=0.3)}
    on_gpu = load_config(assignments=[*BF16, f"model.quantization={quantization}"])
    ours = evaluate_adapters(on_gpu, tiny_model_dir, tiny_datasets_dir, adapters, tmp_path / "gpu")
    exact = evaluate_adapters(load_config(), tiny_model_dir, tiny_datasets_dir, adapters, tmp_path / "cpu")
    # 4-bit weights are another model, if a near one.
    for figure in ("action_loss", "margin"):
        for name in ("base", "tuned"):
            off = abs(ours[figure][name] - exact[figure][name])
            print(quantization, figure, name, ours[figure][name], exact[figure][name])
            assert off <= (0.05 if quantization == "none" else 1.0) * max(1.0, abs(exact[figure][name])), (figure, name)


def test_base_and_tuned_model_write_on_the_gpu(
    tiny_model_dir: Path, tiny_datasets_dir: Path, make_adapter: Callable[..., Path]
) -> None:
    from traceforge_core.evaluation.predict import predict

    config = load_config(assignments=BF16)
    adapters = {"tuned": make_adapter(scale=0.3)}
    (answer,) = predict(config, tiny_model_dir, tiny_datasets_dir, adapters, sample=1, new_tokens=8)
    assert answer["actions"]["base"] != answer["actions"]["tuned"]


def test_an_export_in_bf16_gives_the_adapters_logits(
    tiny_model_dir: Path, tiny_datasets_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    from traceforge_core.export.merge import export

    adapter = make_adapter(scale=0.3)
    figures = export(
        load_config(assignments=BF16), tiny_model_dir, adapter, tmp_path / "out", datasets=tiny_datasets_dir
    )
    print(figures)
    assert (figures["verdict"], figures["dtype"]) == ("pass", "bfloat16")
