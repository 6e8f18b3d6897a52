"""What importing the datasets costs."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
import traceforge_core.datasets as package
names = [module.name for module in pkgutil.iter_modules(package.__path__)]
for name in names:
    importlib.import_module(f"traceforge_core.datasets.{name}")
print(len(names), [name for name in ("torch", "transformers", "trl") if name in sys.modules])
"""


def test_importing_the_datasets_loads_neither_torch_nor_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    count, heavy = done.stdout.split(maxsplit=1)
    assert int(count) > 10
    assert heavy.strip() == "[]"
