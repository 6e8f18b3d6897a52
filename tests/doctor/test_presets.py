"""Which preset suits which cards."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from traceforge_core.config import load_config, preset_names
from traceforge_core.doctor.machine import Gpu, look_at_gpus
from traceforge_core.doctor.presets import choose
from traceforge_core.longcontext.estimate import GIB, Work, estimate_work
from traceforge_core.longcontext.memory import Dimensions
from traceforge_core.longcontext.planner import setup_of

WITH_NF4 = {"bitsandbytes", "unsloth"}


def cards(count: int, gib: float, capability: tuple[int, int] = (8, 9), free: float = 1.0) -> list[Gpu]:
    total = int(gib * 1024)
    return [Gpu(i, "Card", total, int(total * free), capability, "580.65", "13.0") for i in range(count)]


def test_two_24_gb_cards_get_the_preset_made_for_them() -> None:
    assert choose(cards(2, 23.6), set(), WITH_NF4)[:2] == ("qwen3-8b-24gb", [])


def test_the_suggested_settings_make_a_valid_configuration() -> None:
    failed = {"bf16 products", "NCCL", "unsloth"}
    preset, settings, _ = choose(cards(2, 23.6), failed, WITH_NF4)
    config = load_config(preset, assignments=settings)
    assert config.model.cublaslt == "on"
    assert config.preference.transport == "gloo"
    assert config.model.backend == "transformers"


@pytest.mark.parametrize(
    ("gpus", "preset"),
    [
        (cards(1, 23.6), "qwen3-8b-1x24gb"),
        (cards(1, 47.5), "qwen3-8b-1x24gb"),
        (cards(3, 23.6), "qwen3-8b-24gb"),
        (cards(1, 79.1, (9, 0)), "qwen3-8b-1x80gb"),
        (cards(2, 79.1, (8, 0)), "qwen3-8b-2x80gb"),
        (cards(8, 139.8, (9, 0)), "qwen3-8b-2x80gb"),
        ([*cards(1, 79.1), *cards(1, 23.6)], "qwen3-8b-24gb"),
        ([*cards(1, 23.6), *cards(1, 31.7, (7, 0))], "qwen3-8b-1x24gb"),
    ],
    ids=["one 24", "one 48", "three 24", "one 80", "two 80", "eight 141", "80 and 24", "24 and one without bf16"],
)
def test_the_preset_fits_memory_and_number_of_cards(gpus: list[Gpu], preset: str) -> None:
    assert choose(gpus, set(), WITH_NF4)[:2] == (preset, [])


QWEN3_8B = Dimensions(
    layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=12_288, vocabulary=151_936, tied_head=False
)


@pytest.mark.parametrize("name", [name for name in preset_names() if name.endswith("gb")])
def test_by_the_planner_every_preset_fits_its_cards_with_a_quarter_to_spare(name: str) -> None:
    config = load_config(name)
    gib = {24: 23.6, 80: 79.1}[int(name.removesuffix("gb").split("-")[-1].split("x")[-1])]
    completion, longest = 4096, config.datasets.preference.max_length
    pair = Work(config.preference.strategy, longest - completion, completion)  # type: ignore[arg-type]
    sample = Work("sft", config.datasets.sft.max_length - completion, completion)
    for work in (pair, sample):
        setup = setup_of(config, work.kind, 0.75 * gib, host_gib=25)
        assert estimate_work(QWEN3_8B, work, setup).fits(setup), work


def test_the_figures_in_the_presets_are_the_planners() -> None:
    for name in preset_names():
        text = (resources.files("traceforge_core") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
        said = re.search(r"planner expects ([\d.]+) GiB", " ".join(text.replace("#", " ").split()))
        if said is None:
            continue
        config = load_config(name)
        work = Work(config.preference.strategy, 77_824, 4096)  # type: ignore[arg-type]
        planned = estimate_work(QWEN3_8B, work, setup_of(config, work.kind, 80, None)).peak / GIB
        assert planned == pytest.approx(float(said[1]), abs=0.051), name


@pytest.mark.parametrize(
    ("gpus", "word"),
    [([], "no GPU"), (cards(1, 11), "11 GiB"), (cards(2, 31.7, (7, 0)), "bf16")],
    ids=["no GPU", "too small", "without bf16"],
)
def test_other_machines_get_the_tiny_model_and_the_reason(gpus: list[Gpu], word: str) -> None:
    preset, settings, reason = choose(gpus, set(), WITH_NF4)
    assert (preset, settings) == ("tiny-cpu", [])
    assert word in reason


def test_without_nf4_the_preset_that_needs_it_is_named_with_what_it_lacks() -> None:
    preset, _, reason = choose(cards(2, 23.6), {"NF4"}, WITH_NF4)
    assert preset == "tiny-cpu"
    assert "qwen3-8b-24gb" in reason and "bitsandbytes" in reason


def test_a_card_held_by_others_or_too_old_for_bf16_is_a_warning_with_a_cure() -> None:
    busy, old = look_at_gpus([*cards(1, 24, free=0.5), *cards(1, 16, (7, 5))])
    assert busy.status == old.status == "warning"
    assert "nvidia-smi" in busy.do
    assert "model.dtype" in old.do
