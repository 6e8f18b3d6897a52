"""The fault matrix names tests that exist, for every stage there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from traceforge_core.stages import STAGES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`([a-z_/]+\.py)(?:::(\w+))?`", PAGE)
    assert len(named) > 70
    for file, test in named:
        path = ROOT / "tests" / file
        assert path.is_file(), file
        assert not test or test in names_in(path), f"{file} has no {test}"


def test_the_matrix_has_every_stage_and_every_cell_a_key_that_is_explained() -> None:
    rows = re.findall(r"^\| `(\w+)` \|(.+)\|$", PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == list(STAGES)
    explained = set(re.findall(r"^\| ([A-Z]\d) \| `", PAGE, re.MULTILINE))
    used = set()
    for name, cells in rows:
        for cell in cells.split("|"):
            keys = re.findall(r"\b[A-Z]\d\b", cell)
            assert keys, f"{name}: {cell}"
            used |= set(keys)
    assert used == explained


def test_resumed_stages_are_those_that_can_be() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|(.+)\|$", PAGE, re.MULTILINE))
    assert {name for name, cells in rows.items() if "resumed" in cells} == {
        name for name, stage in STAGES.items() if stage.resumable
    }
