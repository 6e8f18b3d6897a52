"""`traceforge init`: the file it writes, and what it refuses to write."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path

import pytest
import yaml

from traceforge_core import initialise as module
from traceforge_core.config import load_config, preset_names
from traceforge_core.doctor.machine import Gpu
from traceforge_core.errors import TraceForgeError
from traceforge_core.initialise import OFTEN_CHANGED, initialise

SAMPLES = Path(str(resources.files("traceforge_core"))) / "samples" / "data"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Somebody's own folder of runs, with its report of outcomes."""
    return Path(shutil.copytree(SAMPLES / "run-1", tmp_path / "my logs"))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "no cache"))


def test_the_file_holds_what_differs_and_comments_what_people_change(data: Path, tmp_path: Path) -> None:
    written = initialise(tmp_path / "my.yaml", data=str(data), preset="tiny-cpu")
    text = written.path.read_text(encoding="utf-8")
    config = load_config("tiny-cpu", written.path)
    assert config == load_config("tiny-cpu", assignments=[f"ingest.path={json.dumps(str(data))}"])
    for path in OFTEN_CHANGED:
        assert f"# {path.rpartition('.')[2]}: " in text, path
    assert "mini-swe-agent" in written.notes[0] and "with outcomes" in written.notes[0]
    assert len(text.splitlines()) < 45


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.usefixtures("offline")
def test_every_commented_line_can_be_switched_on_and_has_the_presets_value(preset: str, tmp_path: Path) -> None:
    written = initialise(tmp_path / "my.yaml", preset=preset)
    head, body = written.path.read_text(encoding="utf-8").split("\n\n", 1)
    assert preset in head
    switched = "\n".join(
        line.replace("# ", "", 1) if line.lstrip().startswith("# ") else line for line in body.splitlines()
    )
    (tmp_path / "on.yaml").write_text(switched, encoding="utf-8")
    assert load_config(preset, tmp_path / "on.yaml") == load_config(preset)
    assert len(_leaves(yaml.safe_load(switched))) >= len(OFTEN_CHANGED)


def test_a_relative_path_works_from_any_folder(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = initialise(Path("my.yaml"), data="my logs", preset="tiny-cpu")
    assert load_config("tiny-cpu", written.path.resolve()).ingest.path == str(data)


def test_a_file_that_is_there_is_kept_unless_forced(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "my.yaml"
    out.write_text("mine\n", encoding="utf-8")
    with pytest.raises(TraceForgeError, match="--force"):
        initialise(out, data=str(data), preset="tiny-cpu")
    assert out.read_text(encoding="utf-8") == "mine\n"
    initialise(out, data=str(data), preset="tiny-cpu", force=True)
    assert "ingest:" in out.read_text(encoding="utf-8")
    with pytest.raises(TraceForgeError, match="is a folder"):
        initialise(tmp_path, data=str(data), preset="tiny-cpu", force=True)


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "no folder or file"), ({}, "No trajectory files"), ({"a.json": '{"x": 1}'}, "a.json: unknown_format")],
    ids=["missing", "empty", "something else"],
)
def test_data_that_is_none_is_said_and_nothing_is_written(
    content: dict[str, str] | None, told: str, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(TraceForgeError, match=told):
        initialise(tmp_path / "my.yaml", data=str(folder), preset="tiny-cpu")
    assert not (tmp_path / "my.yaml").exists()


def test_data_without_outcomes_says_where_to_name_them(data: Path, tmp_path: Path) -> None:
    (data / "run-1.eval.json").unlink()
    written = initialise(tmp_path / "my.yaml", data=str(data), preset="tiny-cpu")
    assert "ingest.outcomes" in written.notes[0]


def test_a_pretrained_model_does_not_get_the_tiny_ones_learning_rate(tiny_model_dir: Path, tmp_path: Path) -> None:
    written = initialise(tmp_path / "my.yaml", model=str(tiny_model_dir / "weights"), preset="tiny-cpu")
    config = load_config("tiny-cpu", written.path)
    assert config.model.name == str(tiny_model_dir / "weights")
    assert (config.sft.learning_rate, config.preference.learning_rate) == (1e-4, 5e-6)
    assert "Qwen3ForCausalLM" in written.notes[1]


def test_a_model_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceForgeError, match="no model at"):
        initialise(tmp_path / "my.yaml", model=str(tmp_path / "no-model"), preset="tiny-cpu")
    assert not (tmp_path / "my.yaml").exists()


@pytest.mark.usefixtures("offline")
def test_a_hub_that_cannot_be_reached_is_a_note(tmp_path: Path) -> None:
    written = initialise(tmp_path / "my.yaml", preset="qwen3-8b-24gb")
    assert "not checked" in written.notes[1] and "Qwen/Qwen3-8B" in written.notes[1]


@pytest.mark.usefixtures("offline")
def test_the_preset_comes_from_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [Gpu(index, "Card", 81_000, 80_000, (9, 0), "580.65", "13.0") for index in range(2)]
    monkeypatch.setattr(module, "_gpus", lambda: cards)
    written = initialise(tmp_path / "my.yaml")
    assert (written.preset, written.reason) == ("qwen3-8b-2x80gb", "2 GPUs of at least 79 GiB")
    assert written.command == f"traceforge run --config {tmp_path / 'my.yaml'}"
    assert load_config(file=written.path) == load_config("qwen3-8b-2x80gb"), "the file names its preset"


def _leaves(tree: object) -> list[object]:
    return [leaf for value in tree.values() for leaf in _leaves(value)] if isinstance(tree, dict) else [tree]
