"""Every command that the docs show: run in a place like a reader's, or, where that cannot be, checked to exist.

A `bash` block runs, unless its first line is a comment that says what it needs: `# needs a GPU`, `# needs a server`,
`# needs the network`, `# takes minutes`. Of those, and of the README's, every program, command and option must exist.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from flows.cli.commands import app
from flows.cli.endings import UsageError
from flows.session import ordered
from tests.python_path import python_path
from traceforge_core.config import load_config

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MARKS = {"# needs a GPU", "# needs a server", "# needs the network", "# takes minutes"}
KNOWN = {
    "git",
    "cd",
    "export",
    ".",
    "cat",
    "pip",
    "ssh",
    "sudo",
    ".venv/bin/pre-commit",
}  # programs that are not ours: nothing is looked up
LIMIT_SECONDS = 300  # a block, on a machine that has much else to do


@dataclass(frozen=True)
class Block:
    """A fenced `bash` block. `mark`: what it needs, "" where it can run anywhere."""

    where: str
    text: str
    mark: str


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, found.start()) + 2
        first = found[1].splitlines()[0]
        mark = first if first.startswith(("# needs", "# takes")) else ""
        yield Block(f"{page.relative_to(ROOT)}:{line}", found[1], mark)


def pages_in_reading_order() -> list[Path]:
    """Pages as the site's navigation has them, then any other."""

    def walk(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, (list, dict)):
            for inner in entry.values() if isinstance(entry, dict) else entry:
                yield from walk(inner)

    nav = walk(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    named = [DOCS / name for name in nav if (DOCS / name).is_file()]
    return named + sorted(set(DOCS.rglob("*.md")) - set(named))


ALL = [block for page in pages_in_reading_order() for block in blocks_of(page)]
README = [block for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md") for block in blocks_of(page)]


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command, without comments, redirections and variables set in front of it."""
    joined = block.text.replace("\\\n", " ")
    for line in joined.splitlines():
        words = shlex.split(line, comments=True)
        for part in (
            " ".join(shlex.quote(word) for word in words).replace(" '||' ", "\n").replace(" '&&' ", "\n").split("\n")
        ):
            simple = shlex.split(part)
            while simple and re.fullmatch(r"[A-Z_]+=.*", simple[0]):
                simple.pop(0)
            if simple and simple[0] != "true":
                yield simple


def test_marks_are_spelt_as_agreed() -> None:
    assert {block.mark for block in ALL} <= MARKS | {""}
    assert sum(not block.mark for block in ALL) >= 6


@pytest.mark.parametrize(
    "block",
    # Prefect's own command takes seconds to say what it knows.
    [pytest.param(each, id=each.where, marks=[pytest.mark.slow] * ("prefect " in each.text)) for each in ALL + README],
)
def test_every_command_exists_with_its_options(block: Block) -> None:
    for words in commands(block):
        check(words)


def check(words: list[str]) -> None:
    program, arguments = words[0], words[1:]
    if program == "traceforge":
        check_traceforge(arguments)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert arguments and set(arguments) <= set(targets), words
    elif program in ("python", "torchrun"):
        check_python(arguments)
    elif program == "prefect":
        check_prefect(arguments)
    else:
        assert program in KNOWN, f"{program}: nobody knows whether this exists"


def check_traceforge(arguments: list[str]) -> None:
    program: Any = typer.main.get_command(app)
    name, *rest = arguments
    assert name in program.commands, f"traceforge {name}"
    try:
        given = program.commands[name].make_context(name, list(rest)).params
    except UsageError as error:
        pytest.fail(f"traceforge {shlex.join(arguments)}: {error.format_message()}")
    config = load_config(given.get("preset") or "tiny-cpu", None, given.get("assignments"))
    if given.get("stages"):
        ordered(given["stages"].split(","), config)


def check_python(arguments: list[str]) -> None:
    if arguments[:2] == ["-m", "pip"]:
        return
    source = ROOT / (arguments[1].replace(".", "/") + ".py" if arguments[0] == "-m" else arguments[0])
    text = source.read_text(encoding="utf-8")
    for option in (word.partition("=")[0] for word in arguments if word.startswith("--")):
        assert f'"{option}"' in text, f"{source.name} has no {option}"


def check_prefect(arguments: list[str]) -> None:
    path = [word for word in arguments[:2] if re.fullmatch(r"[a-z-]+", word)]
    told = prefect_help(tuple(path))
    for option in (word.partition("=")[0] for word in arguments if word.startswith("--")):
        assert option in told, f"prefect {' '.join(path)} has no {option}"
    if path == ["deployment", "run"]:
        flow, _, name = arguments[2].partition("/")
        deployed = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
        assert flow == "traceforge" and name in {each["name"] for each in deployed}, arguments


@functools.cache
def prefect_help(path: tuple[str, ...]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *path, "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"prefect {' '.join(path)}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def reader(tmp_path: Path) -> dict[str, str]:
    """The environment of somebody at the top of a checkout, with an agent's logs in the home folder."""
    home, checkout, programs = tmp_path / "home", tmp_path / "checkout", tmp_path / "bin"
    shutil.copytree(ROOT / "traceforge_core" / "samples" / "data", home / "agent-logs")
    for folder in (checkout, programs):
        folder.mkdir()
    (checkout / "benchmarks").symlink_to(ROOT / "benchmarks")
    (programs / "traceforge").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flows.cli "$@"\n', encoding="utf-8")
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    for program in programs.iterdir():
        program.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return env | {
        "HOME": str(home),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": python_path(ROOT),
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_without_a_mark_runs_one_page_after_the_other(reader: dict[str, str], tmp_path: Path) -> None:
    """In the order of reading, in one place; what stands in two pages runs once. About a minute of processor time."""
    seen = set()
    for block in ALL:
        if block.mark or block.text in seen:
            continue
        seen.add(block.text)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=tmp_path / "checkout",
            env=reader,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        assert done.returncode == 0, f"{block.where}\n{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    left = {path.name for path in (tmp_path / "checkout").iterdir()}
    assert {"my.yaml", "data.html", "my-model", "corpus", "runs"} <= left
