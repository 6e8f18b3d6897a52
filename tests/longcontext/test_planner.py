"""The planner against peaks and times measured on one H200 (benchmarks/long_context.py), and its advice."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from traceforge_core.config import LongContextConfig, load_config
from traceforge_core.errors import TraceForgeError
from traceforge_core.longcontext import planner, tiling
from traceforge_core.longcontext.estimate import GIB, USABLE, Estimate, Setup, Work, estimate_work, untiled_parts
from traceforge_core.longcontext.memory import Dimensions
from traceforge_core.longcontext.planner import choose_strategy, longest_prompt

QWEN3_8B = Dimensions(36, 4096, 32, 8, 128, 12_288, 151_936, tied_head=False)
H200 = Setup(gpu_gib=24, optimizer_bytes=0)
# kind, prompt, completion, settings, measured GiB, measured seconds; Qwen3-8B NF4, r=16
MEASURED: list[tuple[Any, int, int, dict[str, Any], float, float | None]] = [
    ("branch_parallel", 77_824, 4_096, {}, 11.25, 22.44),
    ("shared_prefix", 77_824, 4_096, {}, 11.72, 24.58),
    ("branch_parallel", 28_672, 4_096, {}, 8.522, 5.098),
    ("shared_prefix", 28_672, 4_096, {}, 8.844, 6.117),
    ("branch_parallel", 12_288, 4_096, {}, 7.612, 1.961),
    ("shared_prefix", 12_288, 4_096, {}, 7.888, 2.637),
    ("sft", 0, 32_768, {"optimizer_bytes": 2}, 8.743, 5.595),
    ("shared_prefix", 253_952, 4_096, {"groups": 4, "tile": 2048}, 21.74, 196.7),
    ("shared_prefix", 253_952, 4_096, {}, 19.96, None),  # under a cap of 24 GiB the layers chose 8 groups
    ("shared_prefix", 292_864, 4_096, {}, 21.73, None),
    ("shared_prefix", 1_312_768, 4_096, {"gpu_gib": 80}, 73.12, None),
]


@pytest.mark.parametrize(("kind", "prompt", "completion", "settings", "gib", "seconds"), MEASURED)
def test_peaks_and_times_are_within_a_tenth_of_the_measured(
    kind: Any, prompt: int, completion: int, settings: dict[str, Any], gib: float, seconds: float | None
) -> None:
    estimate = estimate_work(QWEN3_8B, Work(kind, prompt, completion), replace(H200, **settings))
    assert estimate.peak / GIB == pytest.approx(gib, rel=0.05)
    assert seconds is None or estimate.seconds == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize(
    ("transport", "prompt", "completion", "gib"),
    [
        ("nccl", 77_824, 4_096, 12.356), ("gloo", 77_824, 4_096, 12.194),
        ("nccl", 31_129, 1_639, 9.230), ("gloo", 31_129, 1_639, 9.067),
    ],
)  # fmt: skip
def test_a_branch_parallel_worker_is_planned_with_what_its_training_holds(
    transport: Any, prompt: int, completion: int, gib: float
) -> None:
    """Measured on two H200s with AdamW, a pair a step, while tiled layers still held the embeddings."""
    work = Work("branch_parallel", prompt, completion)
    estimate = estimate_work(QWEN3_8B, work, Setup(gpu_gib=141, transport=transport))
    embeddings = 2 * work.tokens * QWEN3_8B.hidden
    assert (estimate.peak + embeddings) / GIB == pytest.approx(gib, rel=0.01)


def test_the_flat_buffer_of_gradients_lies_on_the_gpu_for_nccl_and_is_pinned_for_gloo() -> None:
    flat = 4 * QWEN3_8B.adapter(rank=16)
    assert flat == 43_646_976 * 4

    def added(kind: Any, **settings: Any) -> tuple[float, float]:
        """GPU and host memory beyond that of a worker by itself."""
        work = Work(kind, 28_672, 4_096)
        alone, several = (estimate_work(QWEN3_8B, work, replace(H200, **more)) for more in ({}, settings))
        return several.peak - alone.peak, several.host - alone.host

    assert added("branch_parallel", transport="nccl") == (flat, 0)
    assert added("branch_parallel", transport="gloo") == (0, flat)
    assert added("shared_prefix", transport="nccl") == (0, 0), "one worker sums nothing"
    assert added("shared_prefix", transport="nccl", replicas=2) == (flat, 0)
    assert added("sft", transport="nccl", replicas=2) == (0, 0)


def test_gradients_of_earlier_micro_batches_lie_beside_those_that_the_layers_gather() -> None:
    several = replace(H200, accumulation=4)

    def added(prompt: int) -> float:
        work = Work("shared_prefix", prompt, 4_096)
        return estimate_work(QWEN3_8B, work, several).peak - estimate_work(QWEN3_8B, work, H200).peak

    assert added(77_824) == 4 * QWEN3_8B.adapter(rank=16)
    assert added(12_288) == 0, "the peak is in the head, before the layers have gathered any"


@pytest.mark.parametrize(
    ("tokens", "logits", "gib", "within"),
    [(32_768, 0, 22.4, 0.1), (32_768, 32_768, 43.7, 0.1), (81_920, 4_096, 60.2, 0.25)],
)
def test_plain_layers_are_planned_roughly(tokens: int, logits: int, gib: float, within: float) -> None:
    parts = untiled_parts(QWEN3_8B, H200, tokens, logits, checkpointing=True)
    assert sum(parts.values()) / GIB == pytest.approx(gib, rel=within)


@pytest.mark.parametrize(
    ("groups", "tile", "gib"),
    [(4, 4096, 8.237), (4, 2048, 7.987), (4, 8192, 8.737), (1, 4096, 11.408), (8, 4096, 7.709)],
)
def test_tiles_and_head_groups_move_the_peak_as_measured_on_four_layers(groups: int, tile: int, gib: float) -> None:
    dims, setup = replace(QWEN3_8B, layers=4), replace(H200, groups=groups, tile=tile)
    assert estimate_work(dims, Work("branch_parallel", 77_824, 4_096), setup).peak / GIB == pytest.approx(gib, rel=0.02)


def test_the_longest_prompt_fits_and_the_next_does_not() -> None:
    found = longest_prompt(QWEN3_8B, H200, "shared_prefix", 4_096)
    assert found is not None and found.fits(H200)
    longer = Work("shared_prefix", found.work.prompt + 512, 4_096)
    assert not estimate_work(QWEN3_8B, longer, H200).fits(H200)
    roomy = replace(H200, groups=4, tile=2048)
    assert not estimate_work(QWEN3_8B, found.work, roomy).fits(roomy), "smaller tiles and more groups come first"
    little_host = replace(H200, host_gib=30)
    shorter = longest_prompt(QWEN3_8B, little_host, "shared_prefix", 4_096)
    assert shorter is not None and shorter.host <= 30 * GIB and shorter.work.prompt < found.work.prompt
    assert longest_prompt(QWEN3_8B, replace(H200, gpu_gib=4), "shared_prefix", 4_096) is None


@st.composite
def models(draw: st.DrawFn) -> Dimensions:
    """From one KV head for all (MQA) to one each (MHA)."""
    kv_heads, share = draw(st.sampled_from([(1, 8), (1, 32), (2, 6), (8, 4), (8, 1), (40, 1)]))
    heads = kv_heads * share
    hidden, mlp = draw(st.sampled_from([(2048, 5632), (4096, 12_288), (5120, 25_600)]))
    return Dimensions(draw(st.sampled_from([2, 36, 64])), hidden, heads, kv_heads, 128, mlp, 151_936, False)


setups = st.builds(
    Setup,
    gpu_gib=st.floats(0.5, 200),
    host_gib=st.sampled_from([None, 16.0, 256.0]),
    rank=st.sampled_from([8, 64, 256]),
    tile=st.sampled_from([None, 300, 4096]),
    groups=st.sampled_from([None, 1, 3, 8, 64]),
    inputs_on_device=st.sampled_from([0, 4, 100]),
    recompute=st.sampled_from(["attention", "none"]),
    accumulation=st.sampled_from([1, 4]),
    transport=st.sampled_from([None, "nccl", "gloo"]),
)
kinds = st.sampled_from(["sft", "branch_parallel", "shared_prefix"])
lengths = st.integers(1, 200_000)


@example(
    dims=Dimensions(2, 5120, 160, 40, 128, 25_600, 151_936, False),
    setup=Setup(21.22, rank=256, tile=512, recompute="none", inputs_on_device=4),
    kind="branch_parallel", completion=512, more=1.072,
)  # fmt: skip
@given(dims=models(), setup=setups, kind=kinds, completion=st.sampled_from([1, 4096, 32_768]), more=st.floats(1, 1.3))
def test_more_memory_never_plans_a_shorter_prompt(
    dims: Dimensions, setup: Setup, kind: Any, completion: int, more: float
) -> None:
    small = longest_prompt(dims, setup, kind, completion)
    large = longest_prompt(dims, replace(setup, gpu_gib=setup.gpu_gib * more), kind, completion)
    assert small is None or (large is not None and large.work.prompt >= small.work.prompt)


@given(dims=models(), setup=setups, kind=kinds, completion=st.integers(1, 9000), prompt=lengths, more=lengths)
def test_a_longer_prompt_takes_no_less_memory_and_fits_where_a_longer_one_does(
    dims: Dimensions, setup: Setup, kind: Any, completion: int, prompt: int, more: int
) -> None:
    def estimates(setup: Setup) -> list[Estimate]:
        return [estimate_work(dims, Work(kind, length, completion), setup) for length in (prompt, prompt + more)]

    short, long = estimates(replace(setup, tile=setup.tile or 1024, groups=setup.groups or 4))
    assert short.peak <= long.peak and 0 <= short.host <= long.host
    short, long = estimates(setup)
    assert short.fits(setup) or not long.fits(setup)


@given(
    dims=models(), kind=kinds, completion=st.integers(1, 9000), prompt=lengths,
    gpu_gib=st.floats(4, 200), tile=st.sampled_from([None, 300]), groups=st.sampled_from([None, 3]),
    transport=st.sampled_from([None, "nccl"]),
)  # fmt: skip
def test_the_planner_reckons_with_the_tiles_that_the_layers_choose_from_the_same_memory(
    dims: Dimensions, kind: Any, completion: int, prompt: int, gpu_gib: float, tile: int | None, groups: int | None,
    transport: Any,
) -> None:  # fmt: skip
    import torch

    work, setup = Work(kind, prompt, completion), Setup(gpu_gib, tile=tile, groups=groups, transport=transport)
    planned = estimate_work(dims, work, setup)
    held = sum(planned.parts.get(name, 0.0) for name in ("weights", "adapter", "gradient exchange"))
    free = gpu_gib * GIB - held - 2 * work.tokens * dims.hidden
    config = {
        "num_hidden_layers": dims.layers, "hidden_size": dims.hidden, "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads, "head_dim": dims.head_dim, "intermediate_size": dims.mlp,
        "vocab_size": dims.vocabulary,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "free_bytes", lambda device: free)
        settings = LongContextConfig(tile=tile, head_groups=groups)
        blocks = 3 if kind == "shared_prefix" else 1
        chosen = tiling.choose_tiling(config, work.tokens, torch.device("cuda"), torch.bfloat16, settings, blocks)
    as_chosen = estimate_work(dims, work, replace(setup, tile=chosen[0], groups=chosen[1]))
    assert planned.parts == as_chosen.parts or not as_chosen.fits(setup), "smaller ones only to keep the margin"


def test_keeping_attention_costs_host_memory_and_saves_time() -> None:
    work = Work("branch_parallel", 77_824, 4_096)
    again = estimate_work(QWEN3_8B, work, H200)
    kept = estimate_work(QWEN3_8B, work, replace(H200, recompute="none"))
    assert kept.host / GIB == pytest.approx(45.4, abs=0.2) and again.host / GIB == pytest.approx(22.5)
    assert kept.seconds is not None and again.seconds is not None and 0.8 < kept.seconds / again.seconds < 0.9


def test_the_strategy_follows_from_length_gpus_and_memory() -> None:
    assert choose_strategy(QWEN3_8B, H200, 77_824, 4_096, gpus=1) == ("shared_prefix", "one GPU does both branches")
    kind, why = choose_strategy(QWEN3_8B, H200, 77_824, 4_096, gpus=2)
    assert kind == "shared_prefix" and "0.5" in why
    narrow = replace(H200, gpu_gib=10.7 / USABLE)
    assert choose_strategy(QWEN3_8B, narrow, 77_824, 4_096, gpus=2)[0] == "branch_parallel"
    with pytest.raises(TraceForgeError, match=r"need .* GiB of GPU memory.*max_length="):
        choose_strategy(QWEN3_8B, replace(H200, gpu_gib=10), 77_824, 4_096, gpus=2)
    with pytest.raises(TraceForgeError, match=r"model\.quantization=nf4"):
        choose_strategy(QWEN3_8B, replace(H200, gpu_gib=16, weight_bytes=2), 77_824, 4_096, gpus=2)


def test_samples_of_sft_that_do_not_fit_are_told_the_length_of_samples_that_do() -> None:
    narrow = replace(H200, gpu_gib=9)
    refused = estimate_work(QWEN3_8B, Work("sft", 0, 32_768), narrow)
    assert not refused.fits(narrow)
    told = re.search(r"Set datasets\.sft\.max_length=(\d+) \(", planner.refusal(QWEN3_8B, narrow, refused))
    assert told is not None
    longest = int(told[1])
    assert estimate_work(QWEN3_8B, Work("sft", 0, longest), narrow).fits(narrow)
    assert not estimate_work(QWEN3_8B, Work("sft", 0, longest + 512), narrow).fits(narrow)


def test_each_training_is_planned_with_its_own_optimizer_and_accumulation() -> None:
    settings = [
        "sft.optimizer=adamw_8bit", "sft.gradient_accumulation=8", "preference.gradient_accumulation=1",
        "preference.transport=gloo",
    ]  # fmt: skip
    config = load_config(assignments=settings)
    sft, pairs = (planner.setup_of(config, kind, 24, None) for kind in ("sft", "branch_parallel"))
    assert (sft.optimizer_bytes, sft.accumulation) == (2, 8)
    assert (pairs.optimizer_bytes, pairs.accumulation, pairs.transport) == (8, 1, "gloo")
    assert planner.setup_of(load_config(), "branch_parallel", 24, None).transport == "nccl"


def test_the_tiny_model_is_planned_without_a_hub() -> None:
    from traceforge_core.modeling.tiny import tiny_model, tiny_tokenizer

    assert planner.read_dimensions("tiny") == Dimensions.of(tiny_model(tiny_tokenizer()).config)


def test_a_plan_is_a_table_figures_and_a_plot(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
                "head_dim": 128, "intermediate_size": 12_288, "vocab_size": 151_936, "model_type": "qwen3",
            }
        )
    )  # fmt: skip
    config = load_config(assignments=["model.quantization=nf4", "model.dtype=bfloat16"])
    options: dict[str, Any] = {"prompt": 77_824, "completion": 4_096, "host_gib": None, "gpus": 2}
    figures, text = planner.plan(config, model=str(tmp_path), gpu_gib=24, **options)
    assert [one["kind"] for one in figures["work"]] == ["branch_parallel", "shared_prefix", "sft"]
    assert text.startswith(f"{tmp_path}: weights in NF4, computed in bfloat16, LoRA r=16; seconds as on one H200.\n")
    assert "peak GiB" in text and "Strategy on 2 GPUs: shared_prefix" in text
    assert figures["longest_prompt"]["shared_prefix"] > 250_000
    _, unknown = planner.plan(config, model=str(tmp_path), gpu_gib=24, device_name="RTX 3090", **options)
    assert "RTX 3090 was never measured" in unknown
    planner.plot(
        QWEN3_8B, H200, 4_096, tmp_path / "plan.png", [{"kind": "shared_prefix", "prompt": 77_824, "gib": 11.7}]
    )
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


QWEN3_8B_FILE = {
    "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12_288, "vocab_size": 151_936, "model_type": "qwen3",
}  # fmt: skip
ASKED: dict[str, Any] = {"prompt": 77_824, "completion": 4_096, "gpu_gib": 24, "host_gib": None, "gpus": 2}


def write_model(folder: Path, **changed: Any) -> str:
    (folder / "config.json").write_text(json.dumps(QWEN3_8B_FILE | changed))
    return str(folder)


def test_a_model_that_tiled_layers_do_not_know_is_not_planned(tmp_path: Path) -> None:
    model = write_model(tmp_path, model_type="qwen3_moe")
    with pytest.raises(TraceForgeError, match=r"Cannot plan for .*this model's is qwen3_moe"):
        planner.plan(load_config(), model=model, **ASKED)


def test_a_model_that_cannot_share_a_prefix_is_planned_in_branches_and_the_plan_says_why(tmp_path: Path) -> None:
    config = load_config(assignments=["model.quantization=nf4", "model.dtype=bfloat16"])
    model = write_model(tmp_path, model_type="mistral", sliding_window=4096)
    figures, text = planner.plan(config, model=model, **ASKED)
    assert figures["strategy"] == "branch_parallel" and "sliding window only (4096 tokens)" in figures["advice"]
    assert [one["kind"] for one in figures["work"]] == ["branch_parallel", "sft"]
    assert "Longest prompt as shared_prefix" not in text
    figures, text = planner.plan(config, model=write_model(tmp_path, rope_scaling={"type": "dynamic"}), **ASKED)
    assert figures["strategy"] is None and "rope_type dynamic" in text
    assert [one["kind"] for one in figures["work"]] == ["sft"]


def test_a_checkpoint_in_four_bits_is_planned_so_whatever_the_configuration_asks_for(tmp_path: Path) -> None:
    config = load_config(assignments=["model.dtype=bfloat16"])
    model = write_model(tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    figures, text = planner.plan(config, model=model, **ASKED)
    assert figures["work"][0]["parts_gib"]["weights"] == pytest.approx(5.66, abs=0.01) and "weights in NF4" in text


def test_a_refusal_names_every_setting_that_would_do_alone_or_quantisation_and_length_together() -> None:
    work = Work("branch_parallel", 77_824, 4_096)

    def told(setup: Setup) -> str:
        estimate = estimate_work(QWEN3_8B, work, setup)
        assert not estimate.fits(setup)
        return planner.refusal(QWEN3_8B, setup, estimate)

    kept = replace(H200, gpu_gib=80, recompute="none", host_gib=40)
    assert "long_context.recompute=attention" in told(kept)
    named = re.search(r"long_context\.inputs_on_device=(\d+)", told(replace(kept, recompute="attention", host_gib=10)))
    assert named is not None
    enough = replace(kept, recompute="attention", host_gib=10, inputs_on_device=int(named[1]))
    assert estimate_work(QWEN3_8B, work, enough).fits(enough)
    fewer = replace(enough, inputs_on_device=int(named[1]) - 1)
    assert not estimate_work(QWEN3_8B, work, fewer).fits(fewer)
    assert "long_context.inputs_on_device=0" in told(replace(H200, inputs_on_device=36))
    both = re.search(
        r"Set model.quantization=nf4 datasets.preference.max_length=(\d+) \(", told(Setup(9, weight_bytes=2))
    )
    assert both is not None and int(both[1]) < 81_920
    assert "No setting makes this model fit" in told(replace(H200, gpu_gib=5))


def test_a_plot_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    for name in ("none/plan.png", "plan.docx"):
        with pytest.raises(TraceForgeError, match=f"Cannot write the plot to .*{name}"):
            planner.plot(QWEN3_8B, H200, 4_096, tmp_path / name)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"num_key_value_heads": 7}, "32 is no multiple of num_key_value_heads=7"),
    ],
)
def test_a_model_whose_dimensions_cannot_be_read_is_refused(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    config = {
        "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 12_288,
        "vocab_size": 151_936,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(TraceForgeError, match=rf"config\.json cannot be read \(.*{told}"):
        planner.read_dimensions(str(tmp_path))
