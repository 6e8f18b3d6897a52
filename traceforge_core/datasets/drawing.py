"""Drawing turns from a policy in a worker process: batches of prompts of like length, padded on the left.

    drawn = draw(run_config, model_dir, prompts)        # one list of drawn turns (token ids) a prompt

The process holds the model and ends with it, so its GPU memory is free again. This module imports torch only in there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.paths import written
from traceforge_core.processes.scratch import scratch_folder
from traceforge_core.training.job import Job
from traceforge_core.training.launch import launch
from traceforge_core.training.seats import seats
from traceforge_core.training.stages import resolve_device

PROMPTS, DRAWN = "prompts.jsonl", "drawn.json"


def draw(config: RunConfig, model_dir: Path, prompts: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """`datasets.preference.sampled.draws` turns for each prompt, each up to and with its end-of-turn token, or cut off
    at `new_tokens`. Raises what the launcher raises, and TraceForgeError where the adapter is not there."""
    sampled = config.datasets.preference.sampled
    adapter = written(sampled.adapter) if sampled.adapter else None
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        raise TraceForgeError(
            f"There is no adapter in {adapter} (datasets.preference.sampled.adapter): adapter_config.json is missing. "
            "Name a folder such as runs/<run>/sft/adapter, or leave it empty for the base model."
        )
    with scratch_folder("draw") as folder:
        with (folder / PROMPTS).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(list(prompt)) + "\n" for prompt in prompts)
        job = Job(
            kind="sample",
            trainer="traceforge_core.datasets.drawing:work",
            config=config,
            model_dir=model_dir,
            data=folder / PROMPTS,
            out_dir=folder,
            adapter=adapter,
            device=resolve_device(config.model),
        )
        launch(job, seats(job))
        content: list[list[list[int]]] = json.loads((folder / DRAWN).read_text(encoding="utf-8"))
        return content


def work(job: Job, beat: Callable[[str], None]) -> None:
    """What the worker process does."""
    from traceforge_core.modeling.chat import ChatRenderer
    from traceforge_core.modeling.loading import load_model

    beat("loading the model")
    model, tokenizer = load_model(
        job.model_dir,
        job.config.model,
        device=job.device,
        backend="transformers",
        max_length=1,
        adapter=job.adapter,
        seed=0,
        gradient_checkpointing=False,
    )
    model.eval()
    prompts = [json.loads(line) for line in job.data.read_text(encoding="utf-8").splitlines()]
    sampled = job.config.datasets.preference.sampled
    end = tokenizer.convert_tokens_to_ids(ChatRenderer(tokenizer).end_of_turn)
    drawn: list[list[list[int]]] = [[] for _ in prompts]
    # Sorted by length a batch needs little padding; the longest first, so that memory runs out at once or never.
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    order = [number for number in order for _ in range(sampled.draws)]
    for start in range(0, len(order), sampled.batch_size):
        batch = order[start : start + sampled.batch_size]
        beat(f"drawing turns {start + 1} to {start + len(batch)} of {len(order)}")
        written = generate(
            model,
            [prompts[number] for number in batch],
            end_id=end,
            pad_id=tokenizer.pad_token_id,
            new_tokens=sampled.new_tokens,
            temperature=sampled.temperature,
            seed=sampled.seed + start,
        )
        for number, ids in zip(batch, written, strict=True):
            drawn[number].append(ids)
    (job.out_dir / DRAWN).write_text(json.dumps(drawn), encoding="utf-8")


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    end_id: int,
    pad_id: int,
    new_tokens: int,
    temperature: float,
    seed: int,
) -> list[list[int]]:
    """One turn for each prompt, all at once. Temperature 0 takes the likeliest token."""
    import torch

    device = next(model.parameters()).device
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    bf16 = model.get_input_embeddings().weight.dtype == torch.bfloat16
    choice = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    torch.manual_seed(seed)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        written = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            top_k=0,
            top_p=1.0,
            use_cache=True,
            pad_token_id=pad_id,
            eos_token_id=end_id,
            **choice,
        )
    rows = written[:, longest:].tolist()
    return [row[: row.index(end_id) + 1] if end_id in row else row for row in rows]
