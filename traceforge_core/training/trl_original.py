"""TRL's CPO classes as TRL wrote them, in a worker whose Unsloth has replaced them too.

Unsloth rewrites `trl.experimental.cpo` in place when it is imported (chunked head, shortened prompts, its defaults). A
strategy that must compute what TRL computes inherits from TRL's own source: it is executed once more, under another
module name, so that Unsloth's classes stay where other code expects them.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def original(module: str, name: str) -> Any:
    """`name` of TRL's `module` as its file defines it, whatever has been put in its place since."""
    return getattr(_again(module) if "unsloth" in sys.modules else import_module(module), name)


def _again(module: str) -> ModuleType:
    package, _, last = module.rpartition(".")
    alias = f"{package}._original_{last}"  # in the same package: relative imports in it keep working
    if alias not in sys.modules:
        found = importlib.util.find_spec(module)
        assert found is not None and found.origin is not None
        spec = importlib.util.spec_from_file_location(alias, found.origin)
        assert spec is not None and spec.loader is not None
        fresh = importlib.util.module_from_spec(spec)
        sys.modules[alias] = fresh  # dataclasses and pickle look classes up by their module's name
        spec.loader.exec_module(fresh)
    return sys.modules[alias]
