"""Fixtures that every test may use."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def shared_trajectories() -> Path:
    """Real trajectory files that lie beside the checkout; they are not part of the project."""
    folder = REPOSITORY.parent / "shared" / "trajectories"
    if not folder.is_dir():
        pytest.skip(f"real trajectories are not there ({folder}); they are test data outside the repository")
    return folder


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """Makes a byte-level BPE tokenizer with Qwen's pre-tokenisation, trained on the shipped samples, with the given
    chat template and control tokens; the first token ends a turn, the last pads."""
    from tokenizers import Tokenizer, trainers
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import AddedToken, Qwen2Tokenizer

    frame = Qwen2Tokenizer().backend_tokenizer
    learner = Tokenizer(BPE())
    learner.normalizer, learner.pre_tokenizer = frame.normalizer, frame.pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False)
    samples = sorted((REPOSITORY / "traceforge_core" / "samples" / "data").rglob("*.traj.json"))
    messages = [message for sample in samples for message in json.loads(sample.read_text(encoding="utf-8"))["messages"]]
    learner.train_from_iterator([message.get("content") or "" for message in messages], trainer)
    learned = json.loads(learner.to_str())["model"]
    merges = [tuple(merge) for merge in learned["merges"]]

    def make(template: str | None, *tokens: str) -> Any:
        tokenizer = Qwen2Tokenizer(
            vocab=learned["vocab"], merges=merges, unk_token=None, eos_token=tokens[0], pad_token=tokens[-1]
        )
        for token in tokens:
            tokenizer.add_tokens([AddedToken(token, special=True, normalized=False)])
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture(scope="session")
def chat_tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    """The test tokenizer with TraceForge's ChatML template."""
    from traceforge_core.modeling.template_choice import own_template

    return make_tokenizer(own_template("chatml"), "<|im_end|>", "<|im_start|>", "<|endoftext|>")


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect API of its own for tests that run flows in this process; one for the whole session (7 s)."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB."""
    folder = tmp_path / "small disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def full_disk(small_disk: Path) -> Path:
    """A file system without a byte left; the file `fill` has them all."""
    with contextlib.suppress(OSError), (small_disk / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return small_disk


TEXTS = (
    "The test fails because the loop stops one short.",
    "def total(values):\n    result = 0\n    for i in range(len(values) - 1):\n        result += values[i]\n"
    "    return result",
    "FAILED test_total.py::test_total - assert 3 == 6",
    "I read the file, change the range and run the tests again.",
)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished model stage with the embedded model, its tokenizer trained on TEXTS."""
    from traceforge_core.config import load_config
    from traceforge_core.modeling import prepare, tiny

    folder = tmp_path_factory.mktemp("tiny")
    sample = {"messages": [{"role": "user", "content": text} for text in TEXTS]}
    (folder / "texts").mkdir()
    (folder / "texts" / "one.traj.json").write_text(json.dumps(sample), encoding="utf-8")
    (folder / "model").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "SAMPLES", folder / "texts")
        prepare.prepare_model(load_config(), {}, folder / "model")
    return folder / "model"


@pytest.fixture(scope="session")
def tiny_datasets_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Held-out files as the datasets stage writes them: 9 next actions, and 6 pairs with a growing rejected side."""
    from traceforge_core.datasets.parquet import PREFERENCE_SCHEMA, SFT_SCHEMA, RowWriter
    from traceforge_core.modeling.chat import load_renderer
    from traceforge_core.trajectories.model import Message

    renderer = load_renderer(tiny_model_dir)
    folder = tmp_path_factory.mktemp("datasets")
    with RowWriter(folder / "sft" / "held_out.parquet", SFT_SCHEMA) as samples:
        for number in range(9):
            asked = [Message("user", f"Case {number}: {TEXTS[number % 4]}")]
            done = renderer.encode_completion(asked, [Message("assistant", TEXTS[(number + 1) % 4])])
            samples.write(
                {
                    "sample_id": f"run-{number}#2",
                    "case": f"case-{number}",
                    "trajectory_id": f"run-{number}",
                    "turn": 2,
                    "prompt": done.prompt_text,
                    "completion": done.completion_text,
                    "input_ids": [*done.prompt_ids, *done.completion_ids],
                    "labels": [-100] * len(done.prompt_ids) + [*done.completion_ids],
                    "tokens": len(done.prompt_ids) + len(done.completion_ids),
                    "trimmed_messages": 0,
                }
            )
    with RowWriter(folder / "preference" / "held_out.parquet", PREFERENCE_SCHEMA) as pairs:
        for number in range(6):
            asked = [Message("user", f"Case {number}: {TEXTS[2]}")]
            chosen = renderer.encode_completion(asked, [Message("assistant", TEXTS[3])])
            rejected = renderer.encode_completion(asked, [Message("assistant", TEXTS[0] * (1 + number))])
            row: dict[str, Any] = {
                "pair_id": f"pair-{number}",
                "case": f"case-{number}",
                "miner": "outcome",
                "prompt": "[]",
                "chosen": "[]",
                "rejected": "[]",
                "tools": "[]",
                "prompt_ids": chosen.prompt_ids,
                "chosen_trajectory": "good",
                "rejected_trajectory": "bad",
            }
            for branch, encoded in (("chosen", chosen), ("rejected", rejected)):
                row |= {f"{branch}_ids": encoded.completion_ids, f"{branch}_mask": encoded.completion_mask}
            pairs.write(row)
    return folder


@pytest.fixture(scope="session")
def make_adapter(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """An adapter folder for the tiny model, its B matrices drawn with this standard deviation."""

    def make(seed: int = 0, scale: float = 0.05, r: int = 8) -> Path:
        import torch

        from traceforge_core.config import ModelConfig
        from traceforge_core.modeling.adapters import save_adapter
        from traceforge_core.modeling.loading import load_model

        folder = tmp_path_factory.mktemp("adapters") / "adapter"
        config = ModelConfig.model_validate({"lora": {"r": r, "alpha": 2 * r}})
        options = {"device": "cpu", "backend": "transformers", "max_length": 64, "gradient_checkpointing": False}
        model, _ = load_model(tiny_model_dir, config, adapter=None, seed=seed, **options)
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=scale)
        save_adapter(model, folder)
        return folder

    return make


@pytest.fixture
def trained_run(
    tiny_model_dir: Path, tiny_datasets_dir: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> Any:
    """A run with SFT and Branch-Parallel finished, and a comparison."""
    import shutil

    from traceforge_core.config import load_config
    from traceforge_core.runs import Inputs, Run, run_stage

    here = Run.create(tmp_path / "runs", "run")
    here.save_config(load_config(assignments=["ingest.path=/home/somebody/secret"]).model_dump(mode="json"))
    folders = {
        "model": tiny_model_dir,
        "datasets": tiny_datasets_dir,
        "sft": make_adapter(1, scale=0.2).parent,
        "branch_parallel": make_adapter(2, scale=0.3).parent,
        "compare": None,
    }
    figures = {
        "datasets": {
            "sft_samples": 48,
            "pairs": 31,
            "pairs_held_out": 6,
            "pairs_by_miner": {"outcome": 20, "recovery": 11},
        },
        "branch_parallel": {"steps": 8, "first_loss": 0.9, "last_loss": 0.4, "device": "cpu"},
        "compare": {
            "verdict": "pass",
            "branch_parallel": {"verdict": "pass", "max_loss_difference": 2.5e-8, "steps": 8},
        },
    }
    for name, source in folders.items():

        def fill(out_dir: Path, source: Path | None = source, name: str = name) -> dict[str, Any]:
            if source is not None:
                shutil.copytree(source, out_dir, dirs_exist_ok=True)
            return figures.get(name, {})

        run_stage(here, name, {}, Inputs(), fill)
    return here
