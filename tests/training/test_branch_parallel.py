"""The branch forward against TRL's own `concatenated_forward`, in float64, over batches of every shape."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.experimental.cpo import CPOTrainer

from traceforge_core.training.branch_parallel import (
    BRANCHES,
    BranchParallelTrainer,
    completion_log_probs,
    mean_as_trl,
    mean_nll,
)

VOCABULARY, PAD = 53, 52
BETA, GAMMA = 2.0, 0.5


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).double()


def as_trainer(**fields: Any) -> Any:
    """As much of a trainer as TRL's and our forward and loss look at."""
    device = SimpleNamespace(device=torch.device("cpu"))
    fixed = {
        "is_encoder_decoder": False,
        "pad_token_id": PAD,
        "accelerator": device,
        "aux_loss_enabled": False,
        "loss_type": "simpo",
        "beta": BETA,
        "simpo_gamma": GAMMA,
        "alpha": 0.0,
        "keeps_tail": False,
        "note_scored": lambda counted: None,
        "concatenated_inputs": CPOTrainer.concatenated_inputs,
        "get_batch_logps": CPOTrainer.get_batch_logps,
    }
    return SimpleNamespace(**(fixed | fields))


@st.composite
def batches(draw: Any) -> dict[str, torch.Tensor]:
    """1 to 3 pairs; completions of 1 to 9 tokens, any of whose tokens but one may not count; padded left or right."""
    pairs = draw(st.integers(1, 3))
    left = draw(st.booleans())
    token = st.integers(0, PAD - 1)
    prompts = [draw(st.lists(token, min_size=1, max_size=8)) for _ in range(pairs)]
    batch: dict[str, torch.Tensor] = {}
    for branch in BRANCHES:
        ids, labels = [], []
        for prompt in prompts:
            completion = draw(st.lists(token, min_size=1, max_size=9))
            counts = draw(st.lists(st.booleans(), min_size=len(completion), max_size=len(completion)))
            counts[draw(st.integers(0, len(completion) - 1))] = True
            ids.append(prompt + completion)
            labels.append([-100] * len(prompt) + [t if c else -100 for t, c in zip(completion, counts, strict=True)])
        length = max(map(len, ids))
        for name, rows, filler in (
            ("input_ids", ids, PAD),
            ("labels", labels, -100),
            ("attention_mask", [[1] * len(row) for row in ids], 0),
        ):
            padded = [
                [filler] * (length - len(row)) + row if left else row + [filler] * (length - len(row)) for row in rows
            ]
            batch[f"{branch}_{name}"] = torch.tensor(padded)
    return batch


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=batches(),
    cpo_alpha=st.sampled_from([0.0, 0.7]),
    label_smoothing=st.sampled_from([0.0, 0.1]),
    keeps_tail=st.booleans(),
)
def test_two_branches_give_trls_loss_and_gradients(
    model: Qwen3ForCausalLM, batch: dict[str, torch.Tensor], cpo_alpha: float, label_smoothing: float, keeps_tail: bool
) -> None:
    trainer = as_trainer(cpo_alpha=cpo_alpha, label_smoothing=label_smoothing, keeps_tail=keeps_tail)

    chosen, rejected, _, _, nll = CPOTrainer.concatenated_forward(trainer, model, batch)
    loss = CPOTrainer.cpo_loss(trainer, chosen, rejected)[0].mean() + cpo_alpha * nll
    expected = torch.autograd.grad(loss, list(model.parameters()))

    # What the two workers do, one after the other: the other's score and NLL are numbers without a graph.
    scores = [BranchParallelTrainer.branch_scores(trainer, model, batch, branch) for branch in BRANCHES]
    summed = [torch.zeros_like(gradient) for gradient in expected]
    for branch in range(2):
        own_chosen, own_rejected = (s if n == branch else s.detach() for n, (s, _) in enumerate(scores))
        own_nll = scores[0][1] if branch == 0 else scores[0][1].detach()
        own_loss = CPOTrainer.cpo_loss(trainer, own_chosen, own_rejected)[0].mean() + cpo_alpha * own_nll
        torch.testing.assert_close(own_loss, loss, rtol=1e-12, atol=1e-12)
        for total, part in zip(summed, torch.autograd.grad(own_loss, list(model.parameters())), strict=True):
            total += part

    torch.testing.assert_close(scores[0][0], chosen, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scores[1][0], rejected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(summed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches())
def test_logits_exist_only_where_a_token_is_predicted_that_counts(
    model: Qwen3ForCausalLM, batch: dict[str, torch.Tensor]
) -> None:
    shapes = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    try:
        with torch.no_grad():
            completion_log_probs(
                model, batch["chosen_input_ids"], batch["chosen_attention_mask"], batch["chosen_labels"]
            )
    finally:
        hook.remove()
    wanted = int((batch["chosen_labels"][:, 1:] != -100).any(0).sum())
    assert shapes == [(batch["chosen_labels"].shape[0], wanted, VOCABULARY)]


def test_a_model_that_returns_all_logits_whatever_is_asked_gives_the_same(model: Qwen3ForCausalLM) -> None:
    ids = torch.randint(0, PAD, (2, 12))
    labels = ids.clone()
    labels[:, :7] = -100
    labels[0, 9] = -100

    def stubborn(input_ids: torch.Tensor, logits_to_keep: Any, **options: Any) -> Any:
        return model(input_ids, **options)

    mask = torch.ones_like(ids)
    with torch.no_grad():
        expected, counted, _ = completion_log_probs(model, ids, mask, labels)
        for keeps_tail in (False, True):
            found, also, _ = completion_log_probs(stubborn, ids, mask, labels, keeps_tail=keeps_tail)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            assert torch.equal(counted, also)


def test_log_probs_are_float32_when_the_model_is_bfloat16(model: Qwen3ForCausalLM) -> None:
    half = copy.deepcopy(model).bfloat16()
    ids = torch.randint(0, PAD, (1, 8))
    labels = ids.clone()
    labels[:, :3] = -100
    found, _, _ = completion_log_probs(half, ids, torch.ones_like(ids), labels)
    assert found.dtype == torch.float32


def test_means_leave_out_what_does_not_count() -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -4.0], [-3.0, -5.0, -7.0]])
    counted = torch.tensor([[True, False, True], [False, True, False]])
    positions = torch.tensor([2, 3, 6])
    assert mean_as_trl(log_probs, counted, positions, 9).tolist() == [-2.5, -5.0]
    assert mean_nll(log_probs, counted).item() == pytest.approx(10 / 3)
