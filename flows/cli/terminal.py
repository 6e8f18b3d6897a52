"""A stage's Markdown report as text for a terminal: tables in columns, no marks.

print(as_text(Path("runs/X/datasets/report.md").read_text()))
"""

from __future__ import annotations

import io
import re

WIDTH = 118


def as_text(markdown: str) -> str:
    """Plain text without colours, at most 118 columns wide, lists and code as they were."""
    from rich.console import Console
    from rich.markdown import Markdown

    page = io.StringIO()
    headings_at_the_margin = re.sub(r"^#+ (.*)$", r"**\1**", markdown, flags=re.MULTILINE)  # rich would centre them
    Console(file=page, width=WIDTH, color_system=None, force_terminal=False).print(Markdown(headings_at_the_margin))
    lines = "\n".join(line.rstrip() for line in page.getvalue().splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n")
