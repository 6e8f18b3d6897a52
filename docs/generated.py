"""Pages that are made from the code while the site is built (a MkDocs hook; see mkdocs.yml): nothing to keep in step.

reference/configuration.md     every field, from traceforge_core/config/
reference/command-line.md      every command, from flows/cli/
reference/presets.md           every preset, as it is shipped
contributing.md                CONTRIBUTING.md of the repository
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import typer.main  # noqa: E402
from pydantic import BaseModel  # noqa: E402

from traceforge_core.config import RunConfig, preset_names  # noqa: E402

BOUNDS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))


def on_files(files: Any, config: Any) -> Any:
    """MkDocs calls this with the files of the site; the made pages join them."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """MkDocs calls this with each page: plots of docs/figures go where a page asks for them."""
    return markdown.replace("<!-- figures -->", figures())


def figures() -> str:
    """Every plot in docs/figures, with what a benchmark wrote beside it (a file of the same name in Markdown)."""
    parts = []
    for plot in sorted((ROOT / "docs" / "figures").glob("*.png")):
        title = plot.stem.replace("-", " ").replace("_", " ").capitalize()
        words = plot.with_suffix(".md")
        parts.append(f"## {title}\n\n![{title}](figures/{plot.name})")
        if words.is_file():
            parts.append(words.read_text(encoding="utf-8"))
    return "\n\n".join(parts)


def pages() -> dict[str, str]:
    """Markdown of each made page, by its path in the site."""
    return {
        "reference/configuration.md": configuration_page(),
        "reference/command-line.md": command_line_page(),
        "reference/presets.md": presets_page(),
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"),
        "benchmarks-log.md": (ROOT / "benchmarks" / "LOG.md").read_text(encoding="utf-8"),
    }


# Configuration --------------------------------------------------------------------------------------------------------


def configuration_page() -> str:
    """A table a section, a row a field."""
    parts = [
        "# Every field",
        "A configuration is a preset, with the fields of a file (`--config`) laid over it, then assignments (`--set "
        "section.field=value`). `traceforge config` prints the effective one with the same descriptions; a wrong name "
        "or value is refused within a second, with what is allowed. What each preset sets is on the page "
        "[Presets](presets.md); the defaults below are the fields' own.",
    ]
    schema = RunConfig.model_json_schema()
    for path, section in sections(RunConfig):
        parts.append(f"## `{path}`\n\n{_own_words(section)}")
        rows = []
        for name, field in section.model_fields.items():
            if _is_section(field.annotation):
                continue
            values = _values(schema["$defs"][section.__name__]["properties"][name], schema)
            default = field.get_default(call_default_factory=True)
            description = (field.description or "").replace("|", "\\|").replace("<", "&lt;")
            rows.append(f"| `{path}.{name}` | {_shown(default)} | {values} | {description} |")
        if rows:
            parts.append("\n".join(["| field | default | values | |", "| --- | --- | --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted path, model) of every section below a model, in the order of the file."""
    for name, field in model.model_fields.items():
        if _is_section(field.annotation):
            inner: Any = field.annotation
            yield prefix + name, inner
            yield from sections(inner, f"{prefix}{name}.")


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _own_words(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split())


def _values(schema: dict[str, Any], whole: dict[str, Any]) -> str:
    """What a field takes, in a few words, from its JSON schema."""
    if "$ref" in schema:
        return _values(whole["$defs"][schema["$ref"].rpartition("/")[2]], whole)
    if "anyOf" in schema:
        return " or ".join("empty" if kind.get("type") == "null" else _values(kind, whole) for kind in schema["anyOf"])
    if "enum" in schema:
        return " · ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema["type"] == "array":
        return f"list of: {_values(schema['items'], whole)}"
    words = {"string": "text", "integer": "whole number", "number": "number", "boolean": "`true` · `false`"}
    bounds = [f"{sign} {schema[bound]:g}" for bound, sign in BOUNDS if bound in schema]
    return " ".join([words[schema["type"]], ", ".join(bounds)]).strip()


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


# Command line ---------------------------------------------------------------------------------------------------------


def command_line_page() -> str:
    """A section a command, a row a parameter."""
    from flows.cli import __doc__ as about
    from flows.cli.commands import app

    program: Any = typer.main.get_command(app)
    ends = " ".join((about or "").split("\n\n")[-1].split())
    parts = ["# Command line", f"`traceforge COMMAND --help` says the same in the terminal. {ends}"]
    for name, command in program.commands.items():
        arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
        usage = " ".join(
            [
                f"traceforge {name}",
                *(each.name.upper() if each.required else f"[{each.name.upper()}]" for each in arguments),
                "[OPTIONS]" if command.params else "",
            ]
        )
        parts.append(f"## `traceforge {name}`\n\n{command.help}\n\n```text\n{usage.strip()}\n```")
        rows = [
            f"| {_names(each)} | {_default(each)} | {(each.help or '').replace('|', chr(92) + '|')} |"
            for each in command.params
            if each.name != "help"
        ]
        if rows:
            parts.append("\n".join(["| parameter | default | |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def _default(parameter: Any) -> str:
    if parameter.required:
        return "needed"
    value = parameter.default
    return "" if value in (None, False) or callable(value) else f"`{value}`"


# Presets --------------------------------------------------------------------------------------------------------------


def presets_page() -> str:
    """Each preset's file as it is."""
    parts = [
        "# Presets",
        "`traceforge doctor` ends with the preset that suits a machine, and `traceforge init` writes a configuration "
        "over it. A preset holds only what differs from the fields' [own defaults](configuration.md). Memory figures "
        "in the comments are the planner's, not measured on such cards.",
    ]
    for name in preset_names():
        text = (resources.files("traceforge_core") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
        parts.append(f"## `{name}`\n\n```yaml\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
