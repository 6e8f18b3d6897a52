"""Unsloth's SFT step, and CPOTrainer on the model that Unsloth leaves; in a process of its own."""

from __future__ import annotations

import time
from typing import Any

import torch
from one_gpu.measuring import GIB, measure, record
from one_gpu.model import load_unsloth
from one_gpu.sft import Clock, sft_steps
from one_gpu.steps import COMPLETION, tokens


def section_unsloth() -> None:
    """Unsloth's SFT step, and CPOTrainer as Unsloth leaves it; in a process where nothing else has been measured."""
    import unsloth  # noqa: F401

    start = time.perf_counter()
    model = load_unsloth()
    record("unsloth", "loaded", seconds=time.perf_counter() - start, gib=torch.cuda.memory_allocated() / GIB)
    try:
        sft_steps(model, "Unsloth SFTTrainer", steps=3, section="unsloth", gradient_checkpointing=True)
    except Exception as error:
        record("unsloth", "Unsloth SFTTrainer", failed=repr(error)[:400])
    for prompt, steps in ((12_288, 2),):  # at 77,824 it did not end within two minutes
        name = f"TRL CPOTrainer on Unsloth's model, pair {prompt} + 2 × {COMPLETION}"
        try:
            unsloth_pair(model, name, prompt, steps)
        except Exception as error:
            record("unsloth", name, failed=repr(error)[:400], peak_gib=torch.cuda.max_memory_allocated() / GIB)


def unsloth_pair(model: Any, name: str, prompt: int, steps: int) -> None:
    from transformers import Qwen2Tokenizer
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    class Pairs(torch.utils.data.Dataset):
        column_names = ("prompt", "chosen", "rejected")

        def __len__(self) -> int:
            return steps

        def map(self, *_: Any, **__: Any) -> Any:
            return self

        def __getitem__(self, index: int) -> dict[str, Any]:
            first = tokens(prompt).tolist()
            item: dict[str, Any] = {"prompt_input_ids": first, "prompt_attention_mask": [1] * prompt}
            for seed, branch in ((1, "chosen"), (2, "rejected")):
                more = tokens(COMPLETION, seed).tolist()
                item[f"{branch}_input_ids"] = first + more
                item[f"{branch}_attention_mask"] = [1] * (prompt + COMPLETION)
                item[f"{branch}_labels"] = [-100] * prompt + more
            return item

    clock = Clock()
    trainer = CPOTrainer(
        model=model,
        processing_class=Qwen2Tokenizer(eos_token="<|im_end|>", pad_token="<|endoftext|>"),
        train_dataset=Pairs(),
        args=CPOConfig(
            output_dir="/tmp/cpo", per_device_train_batch_size=1, gradient_accumulation_steps=1,
            max_steps=steps, bf16=True,
            max_length=prompt + COMPLETION, loss_type="simpo", cpo_alpha=0.0, beta=2.0, simpo_gamma=0.5,
            report_to=[], save_strategy="no", optim="adamw_8bit", logging_steps=1, disable_tqdm=True,
            remove_unused_columns=False, gradient_checkpointing=False, disable_dropout=True,
        ),
        callbacks=[clock.callback()],
    )  # fmt: skip
    measure("unsloth", name, trainer.train)
    record("unsloth", name, step_seconds=clock.seconds)
