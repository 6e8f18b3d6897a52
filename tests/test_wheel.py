"""The wheel: what is in it, and that it works far from the checkout, as docs/library.md says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [built] = folder.iterdir()
    return built


def test_it_holds_the_library_with_all_its_files_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "traceforge_core"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    assert {name for name in tracked if name} <= names, "presets, samples, templates, pages"
    assert {name.partition("/")[0] for name in names} == {"traceforge_core", "traceforge_core-0.1.0.dist-info"}
    pages = {path.name for path in (REPOSITORY / "docs" / "errors").glob("*.md")}
    assert {name.rpartition("/")[2] for name in names if name.startswith("traceforge_core/error_pages/")} == pages


def test_it_carries_no_command_that_could_not_work(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith("entry_points.txt")]


@pytest.mark.slow
def test_the_example_of_the_docs_runs_with_it_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site, place = tmp_path / "site packages", tmp_path / "some where"
    place.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
    subprocess.run([*pip, str(wheel)], check=True, timeout=120)
    page = (REPOSITORY / "docs" / "library.md").read_text(encoding="utf-8")
    [example] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (place / "example.py").write_text(example, encoding="utf-8")
    env = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=place, env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["ingest", "model", "datasets", "sft", "pass"]
    assert (place / "my-model" / "model.safetensors").is_file()

    code = (
        "from traceforge_core.errors import __file__ as here, page\n"
        "from traceforge_core.doctor.installed import known_requirements\n"
        "print(here)\nprint(page('nccl'))\nprint(*(each.name for each in known_requirements()))"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=place, env=env, capture_output=True, text=True, check=True)
    here, sentence, packages = told.stdout.splitlines()
    assert {"torch", "prefect", "unsloth"} <= set(packages.split()) and not {"mkdocs", "ray"} & set(packages.split())
    assert Path(here).is_relative_to(site), "it was the wheel that ran, not the checkout"
    assert Path(sentence.removeprefix("See ").removesuffix(".")).is_file()
