"""How wide what is printed may be, and a stage's Markdown report as text: tables in columns, no marks.

print(as_text(Path("runs/X/datasets/report.md").read_text()))
"""

from __future__ import annotations

import io
import re
import shutil

WIDEST = 118
NARROWEST = 40


def columns() -> int:
    """Columns to print in: the terminal's, at most 118; 118 where stdout is none and COLUMNS does not say."""
    return max(NARROWEST, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))


def as_text(markdown: str) -> str:
    """Plain text without colours, as wide as columns() says, lists and code as they were."""
    from rich.console import Console
    from rich.markdown import Markdown

    page = io.StringIO()
    headings_at_the_margin = re.sub(r"^#+ (.*)$", r"**\1**", markdown, flags=re.MULTILINE)  # rich would centre them
    Console(file=page, width=columns(), color_system=None, force_terminal=False).print(Markdown(headings_at_the_margin))
    lines = "\n".join(line.rstrip() for line in page.getvalue().splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n")
