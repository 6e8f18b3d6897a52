"""A short document of headings, paragraphs, lists, tables and pictures, as Markdown and as one self-contained HTML.

parts = [Heading("Comparison"), Text("Verdict: pass"), Table(["step"], [["1"]]), Picture("loss.png", "Loss")]
folder.joinpath("report.md").write_text(markdown(parts))
folder.joinpath("report.html").write_text(html(parts, folder))
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

GOOD, BAD, OPEN = "pass", "fail", "undecided"


@dataclass(frozen=True, slots=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; `code`, **bold** and [links](path) as in Markdown."""

    text: str


@dataclass(frozen=True, slots=True)
class Bullets:
    items: Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG beside the document; `says` is what a reader without it should know."""

    file: str
    says: str


Part = Heading | Text | Bullets | Table | Picture


def markdown(parts: Sequence[Part]) -> str:
    """The document as Markdown; pictures stay links to the files beside it."""
    return "\n\n".join(_markdown(part) for part in parts) + "\n"


def html(parts: Sequence[Part], folder: Path, title: str = "TraceForge") -> str:
    """The document as one HTML file with the pictures of `folder` inside it: nothing is fetched when it is opened."""
    body = "\n".join(_html(part, folder) for part in parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{STYLE}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def _markdown(part: Part) -> str:
    match part:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text):
            return text
        case Bullets(items):
            return "\n".join(f"- {item}" for item in items)
        case Table(header, rows):
            lines = [header, ["---"] * len(header), *rows]
            return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
        case Picture(file, says):
            return f"![{says}]({file})"


def _html(part: Part, folder: Path) -> str:
    match part:
        case Heading(text, level):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Text(text):
            return f"<p>{_inline(text)}</p>"
        case Bullets(items):
            return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + "</ul>"
        case Table(header, rows):
            head = "".join(f"<th>{_inline(cell)}</th>" for cell in header)
            body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
            return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        case Picture(file, says):
            data = base64.b64encode((folder / file).read_bytes()).decode()
            return f'<figure><img alt="{escape(says)}" src="data:image/png;base64,{data}"></figure>'


def _cell(text: str) -> str:
    kind = f' class="{text}"' if text in (GOOD, BAD, OPEN) else ""
    return f"<td{kind}>{_inline(text)}</td>"


def _inline(text: str) -> str:
    safe = escape(text)
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", safe)
    safe = re.sub(r"\*\*([^*]+)\*\*", lambda found: f'<b class="{found[1].split()[-1]}">{found[1]}</b>', safe)
    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', safe)


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid #d0d7de; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { border-bottom: 1px solid #d8dee4; padding: 0.25rem 0.7rem; text-align: left; white-space: nowrap; }
.wide { overflow-x: auto; } img { max-width: 100%; } figure { margin: 1rem 0; }
code { background: #f0f2f4; padding: 0 0.2rem; overflow-wrap: anywhere; } .pass { color: #116329; font-weight: 600; }
.fail { color: #a40e26; font-weight: 600; } .undecided { color: #7d4e00; font-weight: 600; }
"""
