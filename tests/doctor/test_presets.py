"""Which preset suits which cards."""

from __future__ import annotations

import pytest

from traceforge_core.config import load_config
from traceforge_core.doctor.machine import Gpu, look_at_gpus
from traceforge_core.doctor.presets import choose

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


def test_one_24_gb_card_computes_both_branches_itself() -> None:
    preset, settings, reason = choose(cards(1, 23.6), set(), WITH_NF4)
    config = load_config(preset, assignments=settings)
    assert "24gb" in preset
    assert config.preference.strategy == "shared_prefix", reason


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
