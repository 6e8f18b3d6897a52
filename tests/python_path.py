"""Where a process under test finds packages."""

from __future__ import annotations

import os


def python_path(*folders: object) -> str:
    """A value for PYTHONPATH: these folders in front of those that the tests themselves have there, by which the
    libraries may come."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))
