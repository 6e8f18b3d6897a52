"""One pass over a whole trajectory teaches exactly what one pass a turn teaches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from traceforge_core.config import SftDataConfig
from traceforge_core.datasets.sample import IGNORED
from traceforge_core.datasets.sft import sft_samples
from traceforge_core.modeling.chat import ChatRenderer
from traceforge_core.modeling.tiny import tiny_model
from traceforge_core.trajectories.model import Message, Trajectory

STEPS = [("ls", 0), ("cat x", 1), ("sed -i s/a/b/ x", 0), ("submit", 0)]


def loss_and_gradient(model: Any, samples: list[tuple[list[int], list[int]]]) -> tuple[float, dict[str, Any]]:
    """Summed (not averaged) cross entropy over the labelled tokens of all samples, float64, and its gradient."""
    import torch
    from torch.nn.functional import cross_entropy

    model.zero_grad()
    total = 0.0
    for ids, labels in samples:
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
        loss = cross_entropy(logits, torch.tensor(labels[1:]), ignore_index=IGNORED, reduction="sum")
        loss.backward()
        total += loss.item()
    return total, {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("untrainable", [None, 4])
def test_native_is_the_sum_of_its_turns_in_loss_and_gradient(
    renderer: ChatRenderer, make_run: Callable[..., Trajectory], untrainable: int | None
) -> None:
    import torch

    run = make_run("c", "r", STEPS)
    run.messages.insert(6, Message("user", "Please call exactly one tool."))  # a mid-run user turn keeps reasoning too
    if untrainable is not None:
        run.messages[untrainable] = replace(run.messages[untrainable], trainable=False)
    (native,) = sft_samples([run], renderer, SftDataConfig(style="native"), lambda number: True, Counter())
    turns = []
    for turn in run.turns:
        if run.messages[turn].trainable:
            encoded = renderer.encode_completion(run.messages[:turn], [run.messages[turn]], run.tools)
            labels = [IGNORED] * len(encoded.prompt_ids) + encoded.completion_ids.tolist()
            turns.append((encoded.prompt_ids.tolist() + encoded.completion_ids.tolist(), labels))
    assert len(turns) == (4 if untrainable is None else 3)
    learned = [label for _, labels in turns for label in labels if label != IGNORED]
    assert [label for label in native.labels if label != IGNORED] == learned

    model = tiny_model(renderer.tokenizer).double()
    whole_loss, whole = loss_and_gradient(model, [(native.input_ids.tolist(), native.labels.tolist())])
    parts_loss, parts = loss_and_gradient(model, turns)
    assert whole_loss == pytest.approx(parts_loss, rel=1e-9)
    for name, gradient in whole.items():  # the norms and the rotary embedding work in float32 whatever the model does
        assert torch.linalg.norm(gradient - parts[name]) <= 1e-7 * torch.linalg.norm(gradient), name
        assert torch.linalg.norm(gradient) > 0
    assert sum(len(ids) for ids, _ in turns) > 2 * len(native.input_ids)
