"""What base and tuned models would do next, beside what the recorded agent did.

    answers = predict(config, model_dir, datasets_dir, {"sft": Path("runs/X/sft/adapter")}, sample=3)
    print(render(answers))

Greedy and short: to look at, not to measure.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.processes.scratch import scratch_folder

HISTORY_LINES = 12


def predict(
    config: RunConfig,
    model_dir: Path,
    datasets: Path,
    adapters: Mapping[str, Path],
    *,
    sample: int = 1,
    new_tokens: int = 128,
) -> list[dict[str, Any]]:
    """For each of `sample` held-out histories: sample_id, case, turn, prompt_tokens, trimmed_messages (of the
    history, to fit datasets.sft.max_length), history (its end), recorded, and
    actions, the text of each model by name ("base" first).

    Raises TraceForgeError where no history is held out, or an adapter is not there or does not fit.
    """
    from traceforge_core.evaluation import rows
    from traceforge_core.evaluation.evaluate import check_adapters, run_worker
    from traceforge_core.evaluation.worker import Request

    if rows.count_rows(rows.actions_file(datasets)) == 0:
        raise TraceForgeError(
            f"{datasets} holds out no history to go on from. Raise datasets.split.held_out and build the datasets "
            "again."
        )
    request = Request("predict", check_adapters(adapters), sample, new_tokens)
    with scratch_folder("predict") as scratch:
        run_worker(config, model_dir, datasets, request, scratch)
        content: list[dict[str, Any]] = json.loads((scratch / "predictions.json").read_text(encoding="utf-8"))
        return content


def render(answers: Sequence[Mapping[str, Any]], width: int = 110) -> str:
    """The answers as text for a terminal: the end of the history, the recorded action, then each model's."""
    lines = []
    for answer in answers:
        where = "whole trajectory" if answer["turn"] < 0 else f"turn {answer['turn']}"
        cut = answer["trimmed_messages"]
        shortened = f", {cut} message{'s' * (cut > 1)} cut from its middle to fit" if cut else ", nothing of it cut"
        lines += [f"{answer['case']}, {where} ({answer['prompt_tokens']:,} tokens of history{shortened})", ""]
        lines += [f"    {line}" for line in _end_of(answer["history"], width - 4)]
        for name, text in {"recorded": answer["recorded"], **answer["actions"]}.items():
            mark = "  (the same)" if name != "recorded" and text.strip() == answer["recorded"].strip() else ""
            lines += ["", f"  {name}:{mark}"]
            lines += [f"    {piece}" for line in (text or "(nothing)").splitlines() for piece in _wrap(line, width - 4)]
        lines += ["", "-" * width]
    return "\n".join(lines)


def _end_of(history: str, width: int) -> list[str]:
    pieces = [piece for line in history.splitlines() for piece in _wrap(line, width)]
    return ["...", *pieces[-HISTORY_LINES:]] if len(pieces) > HISTORY_LINES else pieces


def _wrap(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, drop_whitespace=False, replace_whitespace=False) or [""]


def split_sample(row: Mapping[str, Any], tokenizer: Any, end_of_turn: str) -> tuple[list[int], str, str]:
    """Where the model takes over in an SFT sample: tokens before, the text before, the recorded text.

    It is the last stretch of tokens in the loss; with loss on everything, where the completion's text begins.
    """
    ids, labels = row["input_ids"], row["labels"]
    end = len(ids)
    while end > 1 and labels[end - 1] == -100:
        end -= 1
    start = end
    while start > 1 and labels[start - 1] != -100:
        start -= 1
    if start == 1:
        start = len(tokenizer(row["prompt"], add_special_tokens=False)["input_ids"])
    text, recorded = (tokenizer.decode(part, skip_special_tokens=False) for part in (ids[:start], ids[start:end]))
    return list(ids[:start]), text[-4000:], _without_end(recorded, end_of_turn)


def write_action(model: Any, tokenizer: Any, prompt_ids: list[int], new_tokens: int, end_of_turn: str) -> str:
    """Greedy continuation up to the end of the turn, or `new_tokens`."""
    import torch

    device = next(model.parameters()).device
    inputs = torch.tensor([prompt_ids], device=device)
    bf16 = model.get_input_embeddings().weight.dtype == torch.bfloat16
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        written = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=sorted({tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(end_of_turn)}),
        )
    return _without_end(tokenizer.decode(written[0, len(prompt_ids) :], skip_special_tokens=False), end_of_turn)


def _without_end(text: str, end_of_turn: str) -> str:
    return text.rstrip().removesuffix(end_of_turn).strip("\n")
