"""Tiled layers against transformers' own path: every family, adapter, padding, tile and group size, to rounding."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import AdaLoraConfig, IA3Config, LoraConfig, PromptTuningConfig, RandLoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config

from tests.longcontext.conftest import ALL_TARGETS, CONFIGS, VOCABULARY, assert_close, gradients, tiny
from traceforge_core.config import LongContextConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.longcontext import enable
from traceforge_core.longcontext.enable import decoder_of, enable_long_context, kept_log_probs, token_log_probs

SMALL = LongContextConfig(tile=5, head_groups=2, logprob_chunk=4)
EVERY_CASE = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def padded(lengths: list[int], left: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random ids, attention mask and labels; no label stands where a padding position would predict it."""
    length = max(lengths)
    ids = torch.randint(0, VOCABULARY, (len(lengths), length))
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, count in enumerate(lengths):
        start = length - count if left else 0
        mask[row, start : start + count] = 1
        labels[row, start + 1 : start + count] = ids[row, start + 1 : start + count]
    return ids, mask, labels


def step(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, labels: torch.Tensor) -> tuple[float, dict]:
    loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("recompute", ["attention", "none"])
def test_loss_and_gradients_of_every_family_equal_the_plain_ones(family: str, recompute: str, wide_norms: None) -> None:
    model = tiny(family)
    batch = padded([23, 17], left=True)
    loss, plain = step(model, *batch)
    enable_long_context(model, "on", SMALL.model_copy(update={"recompute": recompute}))
    tiled_loss, tiled = step(model, *batch)
    assert tiled_loss == pytest.approx(loss, rel=1e-12)
    assert_close(tiled, plain, 1e-10)


@EVERY_CASE
@given(
    family=st.sampled_from(sorted(CONFIGS)),
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=3),
    left=st.booleans(),
    tile=st.integers(1, 45),
    groups=st.integers(1, 4),
    on_device=st.integers(0, 3),
    targets=st.sets(st.sampled_from(ALL_TARGETS), min_size=1).map(lambda found: tuple(sorted(found))),
    rank=st.integers(1, 9),
)
def test_any_length_padding_tile_group_and_adapter_gives_the_same(
    family: str, lengths: list[int], left: bool, tile: int, groups: int, on_device: int, targets: Any, rank: int,
    wide_norms: None,
) -> None:  # fmt: skip
    model = tiny(family, targets=targets, rank=rank)
    batch = padded(lengths, left)
    loss, plain = step(model, *batch)
    enable_long_context(model, "on", LongContextConfig(tile=tile, head_groups=groups, inputs_on_device=on_device))
    tiled_loss, tiled = step(model, *batch)
    assert tiled_loss == pytest.approx(loss, rel=1e-12)
    assert_close(tiled, plain, 1e-10)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_in_low_precision_it_is_as_close_to_the_truth_as_the_plain_path(
    family: str, dtype: torch.dtype, autocast: bool, wide_norms: None
) -> None:
    """A fixed tolerance would measure the model: two right float32 paths differ by 1e-5 in qwen2's query gradients."""
    model, exact_model = tiny(family, dtype), tiny(family)
    exact_model.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    batch = padded([60, 41], left=False)
    exact_loss, exact = step(exact_model, *batch)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _, plain = step(model, *batch)
        enable_long_context(model, "on", SMALL)
        tiled_loss, tiled = step(model, *batch)
    low = autocast or dtype == torch.bfloat16
    assert tiled_loss == pytest.approx(exact_loss, rel=2e-2 if low else 1e-6)
    assert distance(tiled, exact) < 1.5 * distance(plain, exact)
    if not low:
        assert distance(tiled, plain) < 2e-6


def equal_in_tiles(model: Any) -> dict[str, torch.Tensor]:
    """The gradients of a padded batch in tiles, once loss and gradients have been found equal to the plain path's."""
    batch = padded([19, 30], left=True)
    loss, plain = step(model, *batch)
    enable_long_context(model, "on", SMALL)
    tiled_loss, tiled = step(model, *batch)
    assert tiled_loss == pytest.approx(loss, rel=1e-12)
    assert_close(tiled, plain, 1e-10)
    return tiled


def distance(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Relative L2 distance of all gradients together."""
    squares = sum(float((found[name].double() - exact[name].double()).square().sum()) for name in exact)
    return (squares / sum(float(value.double().square().sum()) for value in exact.values())) ** 0.5


def test_a_frozen_layer_and_an_embedding_that_trains_work_through_it(wide_norms: None) -> None:
    model = tiny("qwen2")
    for name, parameter in model.named_parameters():
        if ".layers.1." in name and "lora_" in name:
            parameter.requires_grad_(False)
        if "embed_tokens" in name:
            parameter.requires_grad_(True)
    tiled = equal_in_tiles(model)
    assert any("embed_tokens" in name for name in tiled) and not any(".layers.1." in name for name in tiled)


def test_frozen_embeddings_take_no_memory_until_the_backward_though_checkpointing_asks_for_their_gradient(
    wide_norms: None,
) -> None:
    model, kept = tiny("qwen3"), []
    batch = padded([30], left=True)
    loss, plain = step(model, *batch)
    model.enable_input_require_grads()
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, x: kept.append(weakref.ref(x)))
    enable_long_context(model, "on", SMALL)
    tiled_loss = model(input_ids=batch[0], attention_mask=batch[1], labels=batch[2], use_cache=False).loss
    assert [x() for x in kept] == [None]
    tiled_loss.backward()
    assert tiled_loss.item() == pytest.approx(loss, rel=1e-12)
    assert_close(gradients(model), plain, 1e-10)


def test_gradients_accumulate_over_calls_and_calls_may_overlap(wide_norms: None) -> None:
    model = tiny("qwen3")
    first, second = padded([21], left=False), padded([33, 12], left=True)

    def both() -> dict[str, torch.Tensor]:
        one = model(input_ids=first[0], attention_mask=first[1], labels=first[2]).loss
        two = model(input_ids=second[0], attention_mask=second[1], labels=second[2]).loss
        (one + 2 * two).backward()
        one = model(input_ids=first[0], attention_mask=first[1], labels=first[2]).loss
        one.backward()
        return gradients(model)

    plain = both()
    enable_long_context(model, "on", SMALL)
    assert_close(both(), plain, 1e-10)


def test_a_second_backward_through_one_forward_is_refused(wide_norms: None) -> None:
    model = tiny("llama")
    ids, mask, labels = padded([9], left=False)
    enable_long_context(model, "on", SMALL)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once for each forward"):
        loss.backward()


def test_packed_samples_do_not_see_each_other(wide_norms: None) -> None:
    model = tiny("qwen3")
    ids = torch.randint(0, VOCABULARY, (1, 20))
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    plain = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    enable_long_context(model, "on", SMALL)
    assert torch.allclose(model(input_ids=ids, position_ids=positions, use_cache=False).logits, plain, rtol=1e-10)
    embeds = decoder_of(model).embed_tokens(ids).detach()
    before = embeds.clone()
    given = model(inputs_embeds=embeds, position_ids=positions, use_cache=False).logits
    assert torch.allclose(given, plain, rtol=1e-10)
    assert torch.equal(embeds, before), "a caller's embeddings are left alone"


def test_evaluation_needs_no_graph_and_generation_goes_the_models_own_way(wide_norms: None) -> None:
    model = tiny("llama").eval()
    ids, mask, labels = padded([14], left=False)
    with torch.no_grad():
        plain = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        words = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        enable_long_context(model, "on", SMALL)
        assert model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss == pytest.approx(plain)
        assert torch.equal(model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=False), words)
        hidden = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        assert len(hidden) == 4
        model.config.output_hidden_states = True
        assert len(model(input_ids=ids, use_cache=False).hidden_states) == 4


def test_an_adapter_that_is_switched_off_does_not_count(wide_norms: None) -> None:
    model = tiny("qwen3")
    ids, _, _ = padded([11], left=False)
    with model.disable_adapter():
        plain = model(input_ids=ids, use_cache=False).logits
    enable_long_context(model, "on", SMALL)
    with model.disable_adapter():
        assert torch.allclose(model(input_ids=ids, use_cache=False).logits, plain, rtol=1e-10)


def test_log_probs_of_labelled_tokens_equal_those_from_full_logits(wide_norms: None) -> None:
    model = tiny("mistral")
    ids, mask, labels = padded([25, 13, 2], left=True)
    labels[0, 9:14] = -100

    def plain_log_probs() -> torch.Tensor:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].log_softmax(-1)
        return logits.gather(-1, ids[:, 1:, None])[..., 0][labels[:, 1:] != -100]

    weights = torch.randn(int((labels[:, 1:] != -100).sum()), dtype=torch.float64)
    plain = plain_log_probs()
    (plain * weights).sum().backward()
    expected = gradients(model)
    enable_long_context(model, "on", SMALL)
    found, rows = token_log_probs(model, ids, mask, labels)
    (found * weights).sum().backward()
    assert torch.allclose(found, plain, rtol=1e-10)
    assert torch.equal(rows, (labels[:, 1:] != -100).nonzero()[:, 0])
    assert_close(gradients(model), expected, 1e-10)
    by_position, counted, positions = kept_log_probs(model, ids, mask, labels)
    assert torch.allclose(by_position[counted], plain, rtol=1e-10)
    assert torch.equal(counted, (labels[:, 1:] != -100)[:, positions])


def test_auto_leaves_a_model_on_the_cpu_alone_and_off_undoes_it() -> None:
    model = tiny("qwen3", torch.float32)
    own = decoder_of(model).forward
    assert not enable_long_context(model, "auto", SMALL)
    assert enable_long_context(model, "on", SMALL) and decoder_of(model).forward is not own
    assert not enable_long_context(model, "off", SMALL)
    assert "forward" not in decoder_of(model).__dict__


def test_other_families_and_adapters_are_refused_with_a_reason() -> None:
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50))
    with pytest.raises(TraceForgeError, match=r"families llama, mistral, qwen2, qwen3; this model's is gpt2"):
        enable_long_context(gpt2, "on", SMALL)
    trained = tiny("llama", torch.float32)
    decoder_of(trained).layers[1].mlp.up_proj.base_layer.weight.requires_grad_(True)
    with pytest.raises(TraceForgeError, match=r"layers\.1\.mlp\.up_proj.* is to be trained too"):
        enable_long_context(trained, "on", SMALL)
    learned = get_peft_model(
        AutoModelForCausalLM.from_config(CONFIGS["llama"]()),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    )
    with pytest.raises(TraceForgeError, match="learned prompts"):
        enable_long_context(learned, "on", SMALL)


@pytest.mark.parametrize(
    ("adapter", "told"),
    [
        (lambda: LoraConfig(r=2, target_modules=["o_proj"], lora_dropout=0.1), "dropout off"),
        (lambda: LoraConfig(r=2, target_modules=["o_proj"], use_dora=True), "plain LoRA only.*DoRA"),
        (lambda: LoraConfig(r=2, target_modules=["o_proj"], lora_bias=True), "lora_bias"),
        (lambda: RandLoraConfig(r=2, target_modules=["o_proj"]), "plain LoRA only.*randlora"),
        (lambda: AdaLoraConfig(init_r=2, total_step=9, target_modules=["o_proj"]), "plain LoRA only.*adalora"),
        (lambda: IA3Config(target_modules=["o_proj"], feedforward_modules=[]), "plain LoRA only.*ia3"),
    ],
    ids=["dropout", "dora", "lora-bias", "randlora", "adalora", "ia3"],
)
def test_an_adapter_that_is_no_plain_lora_is_refused_and_auto_leaves_it_alone(
    adapter: Callable[[], Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = get_peft_model(AutoModelForCausalLM.from_config(CONFIGS["llama"]()), adapter()).train()
    with pytest.raises(TraceForgeError, match=told):
        enable_long_context(model, "on", SMALL)
    monkeypatch.setattr(enable, "_on_cuda", lambda model: True)
    assert not enable_long_context(model, "auto", SMALL)
    assert "forward" not in decoder_of(model).__dict__


def test_dropout_of_an_adapter_counts_only_while_training(wide_norms: None) -> None:
    model = tiny("llama").eval()
    decoder_of(model).layers[0].mlp.up_proj.lora_dropout["default"] = torch.nn.Dropout(0.1).eval()
    ids, _, _ = padded([11], left=False)
    plain = model(input_ids=ids, use_cache=False).logits
    enable_long_context(model, "on", SMALL)
    assert torch.allclose(model(input_ids=ids, use_cache=False).logits, plain, rtol=1e-10)
    with pytest.raises(TraceForgeError, match="dropout off"):
        model.train()(input_ids=ids)


def test_adapters_on_embeddings_and_a_head_that_is_trained_whole_work_through_it(wide_norms: None) -> None:
    torch.manual_seed(3)
    base = AutoModelForCausalLM.from_config(CONFIGS["qwen2"]()).double()
    model: Any = get_peft_model(
        base, LoraConfig(r=3, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], use_rslora=True)
    ).train()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter, dtype=torch.float64) / 9
    tiled = equal_in_tiles(model)
    assert any("lora_embedding" in name for name in tiled) and any("lm_head" in name for name in tiled)


def test_a_window_left_over_in_a_llamas_configuration_means_nothing(wide_norms: None) -> None:
    model = tiny("llama")
    decoder_of(model).config.sliding_window = 5
    ids, _, _ = padded([21], left=False)
    plain = model(input_ids=ids, use_cache=False).logits
    enable_long_context(model, "on", SMALL)
    assert torch.allclose(model(input_ids=ids, use_cache=False).logits, plain, rtol=1e-10)


def test_padding_within_a_sample_is_left_out_but_refused_with_a_sliding_window(wide_norms: None) -> None:
    ids, mask, labels = padded([20, 14], left=True)
    mask[0, 7:10], labels[0, 7:11] = 0, -100
    model = tiny("llama")
    loss, plain = step(model, ids, mask, labels)
    enable_long_context(model, "on", SMALL)
    tiled_loss, tiled = step(model, ids, mask, labels)
    assert tiled_loss == pytest.approx(loss, rel=1e-12)
    assert_close(tiled, plain, 1e-10)
    window = tiny("mistral-window")
    enable_long_context(window, "on", SMALL)
    with pytest.raises(TraceForgeError, match="padding at either end"):
        step(window, ids, mask, labels)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
def test_a_layer_in_eight_bits_is_refused(dtype: torch.dtype) -> None:
    model = tiny("llama", torch.float32)
    base = decoder_of(model).layers[2].self_attn.o_proj.base_layer
    base.weight = torch.nn.Parameter(torch.zeros(base.weight.shape, dtype=dtype), requires_grad=False)
    with pytest.raises(TraceForgeError, match=rf"layers\.2\.self_attn\.o_proj: its weights are {dtype}"):
        enable_long_context(model, "on", SMALL)


def test_a_model_that_brings_its_own_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", torch.float32)
    monkeypatch.setattr(type(decoder_of(model)), "__module__", "transformers_modules.somebody.modeling")
    with pytest.raises(TraceForgeError, match="code of its own"):
        enable_long_context(model, "on", SMALL)
