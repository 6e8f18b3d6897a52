"""Each error that people meet often: provoked here, and its message leads to a page with cause and cure."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from traceforge_core.config import RunConfig, load_config
from traceforge_core.errors import TraceForgeError

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "errors"
SAMPLES = ROOT / "traceforge_core" / "samples" / "data"


def linked(text: str) -> set[str]:
    return set(re.findall(r"docs/errors/([a-z-]+)\.md", text))


# The pages ------------------------------------------------------------------------------------------------------------


def test_every_page_has_cause_and_cure_and_stands_in_the_index() -> None:
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    pages = sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "README")
    assert pages == sorted(set(re.findall(r"\(([a-z-]+)\.md\)", index)))
    for name in pages:
        text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
        assert "\n## Cause\n" in text and "\n## Cure\n" in text, name


def test_every_link_of_the_code_has_its_page_and_every_page_a_link() -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for path in (ROOT / "traceforge_core").rglob("*.py")
        if "data" not in path.parts
    ]
    named = {name for source in sources for name in re.findall(r"""(?<!\.)\bpage\(["']([a-z-]+)["']\)""", source)}
    assert named == {path.stem for path in PAGES.glob("*.md")} - {"README"}


def test_settings_that_pages_name_are_there() -> None:
    """A cure that names a field which does not exist is worse than none."""
    fields = flatten(load_config().model_dump())
    sections = "|".join(type(load_config()).model_fields)
    for path in PAGES.glob("*.md"):
        for name in re.findall(rf"\b((?:{sections})\.[a-z_]+(?:\.[a-z_0-9]+)*)\b", path.read_text(encoding="utf-8")):
            assert name in fields, f"{path.name} names {name}"


def flatten(tree: dict[str, Any], prefix: str = "") -> set[str]:
    names = set()
    for name, value in tree.items():
        names.add(prefix + name)
        if isinstance(value, dict):
            names |= flatten(value, f"{prefix}{name}.")
    return names


# Faults of workers, in a real worker ----------------------------------------------------------------------------------

FAULTS = {
    "out-of-memory": "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 23.60 GiB')",
    "cublas-invalid-value": "RuntimeError('CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx(`')",
    "nccl": "torch.distributed.DistBackendError('NCCL error in: ProcessGroupNCCL.cpp: invalid device ordinal')",
    "no-kernel-image": "RuntimeError('CUDA error: no kernel image is available for execution on the device')",
}


@pytest.mark.slow
@pytest.mark.parametrize("page", FAULTS)
def test_a_worker_that_dies_of_a_known_fault_says_what_it_was_doing_and_which_page_helps(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from traceforge_core.training.job import Job
    from traceforge_core.training.launch import launch
    from traceforge_core.training.watch import WorkerError

    code = f"import torch\n\ndef work(job, beat):\n    beat('at step 7')\n    raise {FAULTS[page]}\n"
    (tmp_path / "planted.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job = Job("evaluate", "planted:work", load_config(), tmp_path, tmp_path, tmp_path / "out")
    with pytest.raises(WorkerError) as caught:
        launch(job, [""])
    assert linked(str(caught.value)) == {page}
    assert "at step 7" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert "Traceback" in (tmp_path / "out" / "logs" / "rank0.log").read_text()


def test_memory_advice_names_what_is_not_set_yet_and_nothing_else() -> None:
    from traceforge_core.training.job import Job
    from traceforge_core.training.known_errors import explain

    settings = ["model.quantization=nf4", "preference.batch_size=4", "preference.optimizer=adamw_8bit"]
    config = load_config("qwen3-8b-24gb", assignments=settings)
    here = Path("x")
    job = Job("shared_prefix", "", config, here, here, here)
    told = str(explain(RuntimeError("CUDA out of memory. Tried"), job, "at step 1"))
    assert "planner" not in told, "there is no model to plan with, and the message comes all the same"
    assert "preference.batch_size=1" in told
    assert f"datasets.preference.max_length below {config.datasets.preference.max_length}" in told
    assert "quantization" not in told and "optimizer" not in told and "sft." not in told


@pytest.mark.parametrize(
    ("kind", "settings", "part", "first"),
    [
        ("oracle", {"comparison.oracle_max_length": "null"}, "logits 2", "comparison.oracle_max_length=4096 (compare "),
        ("sft", {"sft.long_context": "off"}, "layer inputs ", "sft.long_context=on; "),
        ("sft", {"sft.gradient_checkpointing": "false", "sft.long_context": "off"}, "activations of all layers ",
         "sft.gradient_checkpointing=true; "),
        ("branch_parallel", {"model.quantization": "none"}, "weights 1", "model.quantization=nf4; "),
        ("shared_prefix", {"long_context.inputs_on_device": "36"}, "inputs on the GPU ",
         "long_context.inputs_on_device=0; "),
    ],
)  # fmt: skip
def test_the_largest_part_is_named_by_the_planner_and_its_setting_comes_first(
    kind: Any, settings: dict[str, str], part: str, first: str, tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from traceforge_core.training.job import Job
    from traceforge_core.training.known_errors import explain

    shape = {"num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    shape |= {"head_dim": 128, "intermediate_size": 12_288, "vocab_size": 151_936}
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    (tmp_path / "model.json").write_text(json.dumps({"weights": "weights"}), encoding="utf-8")
    rows = {
        "input_ids": [[0] * 32_768],
        "prompt_ids": [[0] * (20_480 if kind == "shared_prefix" else 12_288)],
        "chosen_ids": [[0] * 4096],
        "rejected_ids": [[0]],
    }
    pq.write_table(pa.table(rows), tmp_path / "train.parquet")
    config = load_config("qwen3-8b-24gb", assignments=[f"{name}={value}" for name, value in settings.items()])
    job = Job(kind, "", config, tmp_path, tmp_path / "train.parquet", tmp_path)
    told = str(explain(RuntimeError("CUDA out of memory. Tried"), job, "at step 1"))
    assert f"most of it in: {part}" in told and f"What helps, the most first: {first}" in told
    lengths = {"sft": "32,768", "shared_prefix": "20,480 + 4,096"}.get(kind, "12,288 + 4,096")
    assert f"({lengths} tokens)" in told


def test_an_error_that_nobody_knows_or_that_is_a_lost_peer_is_left_as_it_is() -> None:
    from traceforge_core.training.job import Job
    from traceforge_core.training.known_errors import explain

    job = Job("oracle", "", load_config(), Path("x"), Path("x"), Path("x"))
    assert explain(ValueError("odd"), job, "") is None
    assert explain(RuntimeError("NCCL error: remote process exited or there was a network error"), job, "") is None
    assert explain(TraceForgeError("CUDA out of memory"), job, "") is None


def test_two_gpus_asked_for_and_none_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from traceforge_core.training.job import Job
    from traceforge_core.training.seats import seats

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    job = Job("branch_parallel", "", load_config(), Path("x"), Path("x"), Path("x"), branches=2, device="cuda")
    with pytest.raises(TraceForgeError) as caught:
        seats(job)
    assert linked(str(caught.value)) == {"too-few-gpus"}


# Models and tokenizers ------------------------------------------------------------------------------------------------


@pytest.fixture
def model_copy(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """The tiny model as a folder of its own, tokenizer beside the weights, that a test may spoil."""
    folder = Path(shutil.copytree(tiny_model_dir / "weights", tmp_path / "model"))
    shutil.copytree(tiny_model_dir / "tokenizer", folder, dirs_exist_ok=True)
    return folder


def prepare(name: Path, out: Path, **fields: Any) -> None:
    from traceforge_core.modeling.prepare import prepare_model

    out.mkdir()
    prepare_model(RunConfig.model_validate({"model": {"name": str(name)} | fields}), {}, out)


def change_tokenizer(folder: Path, **fields: Any) -> None:
    path = folder / "tokenizer_config.json"
    # Qwen's tokenizer class has tokens of its own where the file names none; the plain class has not.
    plain = {"tokenizer_class": "PreTrainedTokenizerFast"}
    content = {**json.loads(path.read_text(encoding="utf-8")), **plain, **fields}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}), encoding="utf-8")


def test_a_tokenizer_without_padding_token_gets_one(
    model_copy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoTokenizer

    change_tokenizer(model_copy, pad_token=None)
    with caplog.at_level("INFO"):
        prepare(model_copy, tmp_path / "out")
    assert linked(caplog.text) == {"tokenizer-tokens"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    assert tokenizer.pad_token == "<|endoftext|>" != tokenizer.eos_token


def test_a_tokenizer_without_end_token(model_copy: Path, tmp_path: Path) -> None:
    change_tokenizer(model_copy, eos_token=None)
    with pytest.raises(TraceForgeError) as caught:
        prepare(model_copy, tmp_path / "out")
    assert linked(str(caught.value)) == {"tokenizer-tokens"}


def test_a_template_without_generation_marks_gives_the_same_mask(model_copy: Path) -> None:
    from transformers import AutoTokenizer

    from traceforge_core.modeling.chat import ChatRenderer
    from traceforge_core.trajectories.model import Message

    marked, bare = (AutoTokenizer.from_pretrained(model_copy) for _ in range(2))
    bare.chat_template = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", bare.chat_template)
    assert "generation %}" in marked.chat_template and "generation %}" not in bare.chat_template
    talk = [Message("user", "One"), Message("assistant", "First", reasoning="Why"), Message("user", "Two")]
    talk.append(Message("assistant", "Last"))
    ours, theirs = (ChatRenderer(tokenizer).encode(talk) for tokenizer in (bare, marked))
    assert [*ours.input_ids] == [*theirs.input_ids] and [*ours.assistant_mask] == [*theirs.assistant_mask]


def test_a_template_that_loses_reasoning_and_one_that_is_not_there(model_copy: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    (model_copy / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(TraceForgeError, match="reasoning") as caught:
        prepare(model_copy, tmp_path / "lossy", chat_template="model")
    assert linked(str(caught.value)) == {"chat-template"}

    from transformers import AutoTokenizer

    from traceforge_core.modeling.chat import ChatRenderer

    tokenizer = AutoTokenizer.from_pretrained(model_copy)
    tokenizer.chat_template = None
    with pytest.raises(TraceForgeError) as caught:
        ChatRenderer(tokenizer)
    assert linked(str(caught.value)) == {"chat-template"}


def test_a_model_that_is_an_adapter(make_adapter: Any, tmp_path: Path) -> None:
    with pytest.raises(TraceForgeError) as caught:
        prepare(make_adapter(), tmp_path / "out")
    assert linked(str(caught.value)) == {"model-is-an-adapter"}


# Data -----------------------------------------------------------------------------------------------------------------


def build(corpus: Path, model_dir: Path, out: Path, **preference: Any) -> None:
    from traceforge_core.datasets.build import build_datasets
    from traceforge_core.trajectories.ingest import ingest

    config = load_config()
    config.ingest.path = str(corpus)
    for name, value in preference.items():
        setattr(config.datasets.preference, name, value)
    for folder in ("ingest", "datasets"):
        (out / folder).mkdir(parents=True)
    ingest(config, {}, out / "ingest")
    build_datasets(config, {"ingest": out / "ingest", "model": model_dir}, out / "datasets")


def test_runs_of_one_class_only_make_no_outcome_pairs(tiny_model_dir: Path, tmp_path: Path) -> None:
    corpus = Path(shutil.copytree(SAMPLES, tmp_path / "corpus"))
    for report in corpus.rglob("*.eval.json"):
        told = json.loads(report.read_text(encoding="utf-8"))
        told["resolved_ids"] += told["unresolved_ids"] + told["empty_patch_ids"]
        told["unresolved_ids"] = told["empty_patch_ids"] = []
        report.write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(TraceForgeError, match=" 0 unresolved") as caught:
        build(corpus, tiny_model_dir, tmp_path / "out", miners=["outcome"])
    assert linked(str(caught.value)) == {"no-pairs"}


def test_pairs_that_are_all_longer_than_the_limit(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceForgeError, match="too long: ") as caught:
        build(SAMPLES, tiny_model_dir, tmp_path, max_length=40)
    assert linked(str(caught.value)) == {"no-pairs", "pairs-too-long"}


def test_pairs_beyond_the_models_own_context_are_counted_in_a_warning(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    described = json.loads((short / "model.json").read_text(encoding="utf-8"))
    (short / "model.json").write_text(json.dumps(described | {"longest": 600}), encoding="utf-8")
    build(SAMPLES, short, tmp_path / "out")
    warnings = [record.getMessage() for record in caplog.records if "own context of 600 tokens" in record.getMessage()]
    assert len(warnings) == 2 and all(linked(warning) == {"pairs-too-long"} for warning in warnings)


def test_a_full_disk(tmp_path: Path) -> None:
    from traceforge_core.runs import Inputs, Run, run_stage

    def work(_out: Path) -> dict[str, Any]:
        with open("/dev/full", "w", encoding="utf-8") as device:
            device.write("x" * 100_000)
        return {}

    with pytest.raises(TraceForgeError) as caught:
        run_stage(Run.create(tmp_path), "ingest", {}, Inputs(), work)
    assert linked(str(caught.value)) == {"disk-full"}
