"""The documentation site: it builds without a network, its made pages are whole, and it fetches nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import typer.main
import yaml
from pydantic import BaseModel

from flows.cli.commands import app
from tests.python_path import python_path
from traceforge_core.config import RunConfig, load_config, preset_names

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    """docs/generated.py, loaded as MkDocs does: by its path."""
    spec = importlib.util.spec_from_file_location("docs_generated", DOCS / "generated.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. Python's own sockets refuse to connect meanwhile."""
    folder = tmp_path_factory.mktemp("site")
    guard = folder / "guard"
    guard.mkdir()
    (guard / "sitecustomize.py").write_text(
        "import socket\ndef refuse(*arguments): raise OSError('the docs are built without a network')\n"
        "socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "site")]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": python_path(guard)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.mark.slow
def test_the_site_builds_strictly_and_offline_with_every_page(site: Path) -> None:
    built = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")} - {"404"}
    written = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    written = {name.replace("README", "index") for name in written if not name.startswith("figures/")}
    made = {f"reference/{name}" for name in ("configuration", "command-line", "presets")}
    made |= {"contributing", "benchmarks-log"}
    assert built == written | made


@pytest.mark.slow
def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe)[^>]+src="(https?:[^"]+)"', html)
        fetched += re.findall(r'<link[^>]+rel="(?:stylesheet|preconnect|preload)"[^>]+href="(https?:[^"]+)"', html)
        assert not fetched, f"{page.name}: {fetched}"
        assert 'class="mermaid"' not in html, f"{page.name}: Mermaid is fetched from elsewhere; draw an SVG"


def test_the_configuration_page_has_every_field_with_its_description(generated: ModuleType) -> None:
    page = generated.configuration_page()
    rows = {row.split("|")[1].strip(" `"): row for row in page.splitlines() if row.startswith("| `")}

    def leaves(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
        found = {}
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                found |= leaves(field.annotation, f"{prefix}{name}.")
            else:
                found[prefix + name] = field.description or ""
        return found

    fields = leaves(RunConfig)
    assert sorted(rows) == sorted(fields) and len(fields) > 80
    for name, description in fields.items():
        assert description.split(".")[0].split("<")[0].split("|")[0] in rows[name], name
    assert "`auto` · `nccl` · `gloo`" in rows["preference.transport"]
    assert "number ≥ 0.9, < 1" in rows["comparison.confidence"]
    assert "whole number > 0 or empty" in rows["sft.max_steps"]


def test_the_command_line_page_has_every_command_and_parameter(generated: ModuleType) -> None:
    page = generated.command_line_page()
    program = typer.main.get_command(app)
    for name, command in program.commands.items():  # type: ignore[attr-defined]
        part = page.split(f"## `traceforge {name}`\n")[1].split("\n## ")[0]
        for parameter in command.params:
            shown = parameter.opts[-1] if parameter.param_type_name == "option" else parameter.name.upper()
            assert f"`{shown}`" in part or shown == "--help", f"{name}: {shown}"
    assert "traceforge ingest PATH [OPTIONS]" in page


def test_the_presets_page_has_every_preset_word_for_word(generated: ModuleType) -> None:
    page = generated.presets_page()
    for name in preset_names():
        text = (ROOT / "traceforge_core" / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
        assert f"## `{name}`\n\n```yaml\n{text.rstrip()}\n```" in page


def test_plots_of_benchmarks_join_the_page_that_asks_for_them(
    generated: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    (tmp_path / "docs" / "figures" / "long-context.png").write_bytes(b"png")
    (tmp_path / "docs" / "figures" / "long-context.md").write_text("On an H200.", encoding="utf-8")
    monkeypatch.setattr(generated, "ROOT", tmp_path)
    page = generated.on_page_markdown("a\n\n<!-- figures -->\n\nb", None, None, None)
    assert page == "a\n\n## Long context\n\n![Long context](figures/long-context.png)\n\nOn an H200.\n\nb"


def test_seconds_and_memory_on_the_benchmarks_page_stand_in_the_log() -> None:
    page, log = (path.read_text(encoding="utf-8") for path in (DOCS / "benchmarks.md", ROOT / "benchmarks" / "LOG.md"))
    measured = re.findall(r"\| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(measured) >= 8
    for seconds, gib in measured:
        assert re.search(rf"\| {re.escape(seconds)}\b[^|]*\| {re.escape(gib)} \|", log), (seconds, gib)


def test_drawings_are_whole_and_say_what_they_show() -> None:
    drawings = sorted((DOCS / "diagrams").glob("*.svg"))
    used = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    for drawing in drawings:
        root = ElementTree.parse(drawing).getroot()
        title = root.find("{http://www.w3.org/2000/svg}title")
        assert title is not None and title.text
        assert f"diagrams/{drawing.name})" in used
        assert "href=" not in drawing.read_text(encoding="utf-8")
    assert len(drawings) == 4


def test_configurations_shown_in_the_docs_are_valid(tmp_path: Path) -> None:
    shown = 0
    for page in DOCS.rglob("*.md"):
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            assert isinstance(yaml.safe_load(block), dict)
            (tmp_path / "shown.yaml").write_text(block, encoding="utf-8")
            load_config("tiny-cpu", tmp_path / "shown.yaml")
            shown += 1
    assert shown


def test_the_chinese_quick_start_has_the_commands_of_the_english_one() -> None:
    pages = [(DOCS / folder / "quick-start.md").read_text(encoding="utf-8") for folder in ("", "zh")]
    english, chinese = (re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL) for page in pages)
    assert english == chinese and len(english) > 5
    assert set(re.findall(r"`(tiny-cpu|qwen3-8b-[0-9a-z-]+)`", pages[1])) == set(preset_names())
