"""The model stage finds the model, settles its tokenizer, and says plainly what is wrong with an unusable one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.modeling.conftest import change
from tests.python_path import python_path
from traceforge_core.config import RunConfig
from traceforge_core.errors import TraceForgeError
from traceforge_core.modeling.prepare import prepare_model
from traceforge_core.modeling.tiny import CHATML

REPOSITORY = Path(__file__).parents[2]


def prepare(out_dir: Path, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures and model.json."""
    out_dir.mkdir(parents=True, exist_ok=True)
    figures = prepare_model(RunConfig.model_validate({"model": fields}), {}, out_dir)
    return figures, json.loads((out_dir / "model.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_tiny_is_built_into_the_stage_and_named_relative_to_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    figures, described = prepare(tmp_path / "one", name="tiny")
    assert described["weights"] == "weights" and described["revision"] is None
    assert (figures["architecture"], figures["vocabulary"], figures["layers"]) == ("Qwen3ForCausalLM", 2048, 2)
    moved = (tmp_path / "one").rename(tmp_path / "elsewhere")
    AutoModelForCausalLM.from_pretrained(moved / described["weights"])
    tokenizer = AutoTokenizer.from_pretrained(moved / "tokenizer")
    assert tokenizer.chat_template == CHATML.read_text(encoding="utf-8") and tokenizer.pad_token is not None


def test_a_local_folder_stays_where_it_is(model: Path, tmp_path: Path) -> None:
    figures, described = prepare(tmp_path / "out", name=str(model))
    assert described["weights"] == str(model.resolve())
    assert "weights" not in figures
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.json", "tokenizer"}


OWN_CODE = """
from pathlib import Path
from transformers import Qwen2TokenizerFast
Path(r"{marker}").touch()
class OwnTokenizer(Qwen2TokenizerFast):
    pass
"""
TRUST = """
import json, sys
from pathlib import Path
from traceforge_core.config import RunConfig
from traceforge_core.modeling.prepare import prepare_model
model, out, marker = sys.argv[1:]
def prepare(**more):
    return prepare_model(RunConfig.model_validate({"model": {"name": model, **more}}), {}, Path(out))
Path(out).mkdir()
print(json.dumps([prepare(), Path(marker).exists()]))
print(json.dumps([prepare(trust_remote_code=True), Path(marker).exists()]))
"""


@pytest.mark.slow
def test_code_that_comes_with_a_model_is_run_only_where_that_was_asked_for_and_then_it_is_said(
    model: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "it ran"
    (model / "own_code.py").write_text(OWN_CODE.replace("{marker}", str(marker)), encoding="utf-8")
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own_code.OwnTokenizer"]}}
    change(model / "tokenizer_config.json", **own)
    done = subprocess.run(
        [sys.executable, "-c", TRUST, str(model), str(tmp_path / "out"), str(marker)],
        env=os.environ | {"HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": python_path(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (without, ran_before), (figures, ran_after) = map(json.loads, done.stdout.splitlines())
    assert "trust_remote_code" not in without and not ran_before
    assert figures["trust_remote_code"] is True and ran_after and "is run" in done.stderr
    assert json.loads((tmp_path / "out" / "model.json").read_text())["trust_remote_code"] is True


def test_a_missing_padding_token_is_chosen_from_the_vocabulary(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    change(model / "tokenizer_config.json", pad_token=None)
    prepare(tmp_path / "out", name=str(model))
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer").pad_token == "<|endoftext|>"


def test_the_wanted_template_is_saved_with_the_tokenizer(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")
    _, described = prepare(tmp_path / "out", name=str(model), chat_template="chatml")
    assert described["chat_template"] == "chatml"
    saved = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    assert saved.chat_template == CHATML.read_text(encoding="utf-8")


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: change(folder / "config.json", model_type="llamb"), r"cannot use the config\.json of"),
        (without_tokenizer, r"There are no tokenizer files at"),
        (lambda folder: change(folder / "config.json", vocab_size=1000), r"has 2048 tokens, its model only 1000"),
        (lambda folder: change(folder / "tokenizer_config.json", eos_token=None), r"names no end-of-sequence token"),
    ],
    ids=["unknown type", "no tokenizer", "vocabulary", "eos"],
)
def test_a_folder_whose_tokenizer_or_type_does_not_do_is_refused_with_the_reason(
    model: Path, tmp_path: Path, spoil: Callable[[Path], Any], message: str
) -> None:
    spoil(model)
    with pytest.raises(TraceForgeError, match=message):
        prepare(tmp_path / "out", name=str(model))
    assert not (tmp_path / "out" / "model.json").exists()


@pytest.mark.parametrize("targets", [["nope"], ["q_proj", "nope"]])
def test_an_adapter_on_layers_that_are_not_there_is_refused_before_weights_are_loaded(
    model: Path, tmp_path: Path, targets: list[str]
) -> None:
    with pytest.raises(TraceForgeError, match=r"has no layer named nope \(model\.lora\.targets\).* q_proj, up_proj"):
        prepare(tmp_path / "out", name=str(model), lora={"targets": targets})
