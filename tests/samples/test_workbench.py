"""The workbench runs commands for real, and hides the machine it runs on."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from traceforge_core.samples.workbench import Workbench

pytestmark = pytest.mark.skipif(
    shutil.which("git") is None, reason="the workbench makes a git checkout; git is missing"
)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    folder = tmp_path / "program"
    (folder / "tests").mkdir(parents=True)
    (folder / "thing.py").write_text("def double(x):\n    return x * 2\n")
    (folder / "tests" / "__init__.py").touch()
    (folder / "tests" / "test_thing.py").write_text(
        "import unittest\nfrom thing import double\n\n\nclass T(unittest.TestCase):\n"
        "    def test_it(self):\n        self.assertEqual(double(2), 5)\n"
    )
    return folder


def test_commands_change_the_copy_and_not_the_program(program: Path) -> None:
    with Workbench(program) as bench:
        assert bench.run("sed -i 's/2/3/' thing.py").returncode == 0
        assert "+    return x * 3" in bench.run("git diff -- thing.py").output
        assert bench.run("false").returncode == 1
    assert program.joinpath("thing.py").read_text().endswith("x * 2\n")


def test_output_names_neither_folder_nor_interpreter_nor_time(program: Path) -> None:
    with Workbench(program) as bench:
        observation = bench.run("pwd; python -c 'import sys; print(sys.executable, object())'; python -m unittest")
        folder = str(bench.folder)
    assert observation.returncode != 0
    assert "AssertionError: 4 != 5" in observation.output
    assert observation.output.startswith("/testbed\n/usr/bin/python <object object at 0x7f0000000000>")
    assert 'File "/testbed/tests/test_thing.py"' in observation.output
    assert "Ran 1 test in 0.001s" in observation.output
    for trace in (folder, os.path.expanduser("~") + "/", sys.prefix):
        assert trace not in observation.output


def test_python_has_no_site_packages_whatever_is_installed(program: Path) -> None:
    with Workbench(program) as bench:
        observation = bench.run("python -m pytest -q")
    assert (observation.returncode, observation.output) == (1, "/usr/bin/python: No module named pytest\n")


def test_the_checkout_is_removed_even_after_an_error(program: Path) -> None:
    with pytest.raises(RuntimeError, match="on purpose"), Workbench(program) as bench:
        folder = bench.folder
        assert folder.is_dir()
        raise RuntimeError("on purpose")
    assert not folder.parent.exists()
