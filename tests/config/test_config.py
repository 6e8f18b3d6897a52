"""The configuration tree: presets, files, assignments, and what wrong values say."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from traceforge_core.config import RunConfig, load_config, preset_names
from traceforge_core.errors import TraceForgeError


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_is_valid(preset: str) -> None:
    assert load_config(preset).model_dump(mode="json")


def test_the_presets_people_are_told_of_are_there() -> None:
    told = {"tiny-cpu", "qwen3-8b-1x24gb", "qwen3-8b-24gb", "qwen3-8b-1x80gb", "qwen3-8b-2x80gb"}
    assert told <= set(preset_names())


def test_every_field_has_a_description() -> None:
    def walk(section: type[BaseModel], path: str) -> list[str]:
        missing = []
        for name, field in section.model_fields.items():
            if not field.description:
                missing.append(f"{path}{name}")
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                missing += walk(field.annotation, f"{path}{name}.")
        return missing

    assert walk(RunConfig, "") == []


def test_a_file_is_laid_over_the_preset_and_assignments_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("sft: {max_steps: 3, batch_size: 4}\n")
    config = load_config("tiny-cpu", file, ["sft.max_steps=7"])
    assert (config.sft.max_steps, config.sft.batch_size) == (7, 4)
    assert config.sft.checkpoint_steps == load_config("tiny-cpu").sft.checkpoint_steps


def test_a_section_whose_lines_are_all_commented_out_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("sft:\n  # max_steps: 3\ndatasets:\n  split:\n    # held_out: 0.5\n  sft: {max_length: 512}\n")
    assert load_config("qwen3-8b-24gb", file) == load_config("qwen3-8b-24gb", None, ["datasets.sft.max_length=512"])


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("5.0e-4", 5e-4), ("2", 2.0)])
def test_numbers_may_be_written_as_people_write_them(text: str, value: float) -> None:
    assert load_config(assignments=[f"sft.learning_rate={text}"]).sft.learning_rate == value


@pytest.mark.parametrize(
    "text", ["2024-01-01", "2024", "12e4567", "yes", "[1]", "~/logs", "logs #2", "#2", "a: b", "two\nlines"]
)
def test_text_is_text_whatever_yaml_reads_in_it(text: str) -> None:
    config = load_config(assignments=[f"ingest.path={text}", f"model.revision={text}"])
    assert (config.ingest.path, config.model.revision) == (text, text)
    assert load_config(assignments=["ingest.path='a b'", "model.revision=null"]).model.revision is None


def test_text_that_a_file_leaves_bare_is_to_be_quoted(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("ingest: {path: 2024-01-01}\n")
    with pytest.raises(TraceForgeError, match=r"ingest\.path: .* write it in quotes"):
        load_config(file=file)


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("sft.batch_size=true", ["sft.batch_size", "must be a number"]),
        ("comparison.oracle_max_length=yes", ["comparison.oracle_max_length", "must be a number"]),
        ("model.backend=tensorflow", ["model.backend", "'transformers'"]),
        ("sft.steps=3", ["sft.steps", "max_steps"]),
        ("sft.max_steps=-1", ["sft.max_steps", "greater than 0", "-1"]),
        ("nonsense=1", ["nonsense", "ingest"]),
        ("ingest.path", ["section.field=value"]),
        ("datasets.preference.miners=[given]", ["given", "JSONL"]),
        ("datasets.preference.miners=[]", ["datasets.preference.miners"]),
        ("sft=null", ["sft: is a section", "max_steps"]),
        ("datasets.split=0.3", ["datasets.split: is a section", "0.3", "held_out, by, seed"]),
        ("sft.report_to=wandb", ["sft.report_to", "[wandb]"]),
        ("hosts.count=2", ["hosts: hosts.count above 1 needs hosts.address"]),
    ],
)
def test_a_wrong_value_names_the_field_and_what_is_allowed(assignment: str, expected: list[str]) -> None:
    with pytest.raises(TraceForgeError) as error:
        load_config(assignments=[assignment])
    for part in expected:
        assert part in str(error.value)


def test_a_file_may_name_its_preset_and_who_starts_the_run_another(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("preset: qwen3-8b-24gb\nsft: {max_steps: 2}\n")
    config = load_config(file=file)
    assert (config.model.quantization, config.sft.max_steps) == ("nf4", 2)
    assert load_config("tiny-cpu", file).model.quantization == "none"
    file.write_text("preset: huge\n")
    with pytest.raises(TraceForgeError, match=r"There is no preset 'huge' \(.*mine\.yaml\)\. Presets: "):
        load_config(file=file)


def test_an_unknown_preset_names_the_ones_there_are() -> None:
    with pytest.raises(TraceForgeError, match="tiny-cpu"):
        load_config("huge-tpu")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"- a\n- b\n", "must hold sections"),
        (b"a: [1\n", "is not valid YAML: while parsing a flow sequence\n  at line 1, column 4"),
        (b"sft:\n\tmax_steps: 3\n", r"is not valid YAML: while scanning(.|\n)*\nIndent with spaces"),
        (b"sft: {max_steps: 2020-13-45}", "is not valid YAML"),
        (b"[" * 100_000, "is not valid YAML"),
        (b"ingest: {path: /tmp/\xe9}", "is not UTF-8"),
        ("ingest: {}".encode("utf-16"), "is not UTF-8"),
    ],
    ids=["a list", "an open bracket", "a tab", "no date", "endless nesting", "Latin-1", "UTF-16"],
)
def test_a_config_file_that_cannot_be_used_is_named_with_the_reason(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    with pytest.raises(TraceForgeError, match=rf"mine\.yaml {why}"):
        load_config(file=file)


@pytest.mark.parametrize(
    ("content", "key"),
    [("sft: {max_steps: 2}\nmodel: {}\nsft:\n  epochs: 2\n", "sft"), ("sft:\n  seed: 1\n  seed: 2\n", "seed")],
)
def test_a_key_that_stands_in_a_file_twice_is_named_with_both_lines(tmp_path: Path, content: str, key: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with pytest.raises(TraceForgeError) as caught:
        load_config(file=file)
    assert f"the key '{key}' stands here first" in str(caught.value)
    assert str(caught.value).count("line ") == 2 and "mine.yaml" in str(caught.value)


def test_a_merged_key_may_be_overridden(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("sft: &shared {max_steps: 2, seed: 3}\npreference:\n  <<: *shared\n  seed: 4\n")
    config = load_config(file=file)
    assert (config.preference.max_steps, config.preference.seed, config.sft.seed) == (2, 4, 3)


@pytest.mark.parametrize("assignment", ["sft.learning_rate=.inf", "sft.seed=-1", "comparison.loss_atol=.inf"])
def test_numbers_that_mean_nothing_are_refused(assignment: str) -> None:
    with pytest.raises(TraceForgeError, match=assignment.partition("=")[0]):
        load_config(assignments=[assignment])


def test_a_config_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(TraceForgeError, match="No such file"):
        load_config(file=tmp_path / "absent.yaml")


def test_the_same_tree_comes_back_from_json() -> None:
    config = load_config()
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("word", ["on", "off", "auto"])
def test_on_and_off_are_words_though_yaml_reads_them_as_truth(word: str) -> None:
    assert load_config(assignments=[f"model.cublaslt={word}"]).model.cublaslt == word
