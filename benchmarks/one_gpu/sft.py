"""Steps of TRL's SFTTrainer: in tiles, and with what TRL offers against memory."""

from __future__ import annotations

import time
from typing import Any

import torch
from one_gpu.measuring import cap, measure, record
from one_gpu.model import shared_model
from one_gpu.steps import disable, enable, tokens

SFT_TOKENS = 32_768


class Clock:
    """Times each optimizer step of a trainer, from its start to the end of the device's work."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def callback(self) -> Any:
        from transformers import TrainerCallback

        clock = self

        class Timer(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                torch.cuda.synchronize()
                clock.start = time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                torch.cuda.synchronize()
                clock.seconds.append(time.perf_counter() - clock.start)

        return Timer()


def sft_steps(model: Any, name: str, steps: int = 2, section: str = "sft", **options: Any) -> None:
    """Steps of TRL's SFTTrainer on 32,768 tokens, all in the loss."""
    from datasets import Dataset
    from transformers import Qwen2Tokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = Qwen2Tokenizer(eos_token="<|im_end|>", pad_token="<|endoftext|>")
    rows = [tokens(SFT_TOKENS, seed).tolist() for seed in range(steps)]
    clock = Clock()
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        args=SFTConfig(
            output_dir="/tmp/sft", per_device_train_batch_size=1, gradient_accumulation_steps=1,
            max_steps=steps, bf16=True, max_length=None,
            packing=False, dataset_kwargs={"skip_prepare_dataset": True}, report_to=[], save_strategy="no",
            optim="adamw_8bit", logging_steps=1, disable_tqdm=True, **options,
        ),
        callbacks=[clock.callback()],
    )  # fmt: skip
    measure(section, name, trainer.train)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    record(section, name, step_seconds=clock.seconds, losses=[entry["loss"] for entry in log])


def section_sft() -> None:
    """SFT steps in one process: ours, and transformers + peft with what TRL offers against memory."""
    model = shared_model()
    enable(model)
    with cap(24):
        sft_steps(model, "TRL SFTTrainer, tiled layers", gradient_checkpointing=False)
    disable(model)
    ordinary = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    for name, options in {
        "TRL SFTTrainer, gradient checkpointing": {},
        "TRL SFTTrainer, activation_offloading": {"activation_offloading": True},
        "TRL SFTTrainer, Liger": {"use_liger_kernel": True},
    }.items():
        try:
            sft_steps(model, name, **ordinary, **options)
        except Exception as error:
            record("sft", name, failed=repr(error)[:300])
