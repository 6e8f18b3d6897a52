"""The configuration as YAML with each field's description as a comment above it, ready to be edited and given back."""

from __future__ import annotations

import textwrap

import yaml
from pydantic import BaseModel


def described(section: BaseModel, indent: str = "") -> str:
    """YAML text of a section and those below it. `load_config(file=...)` reads it back to the same configuration."""
    blocks = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        margin = f"{indent}# "
        comment = "\n".join(
            textwrap.wrap(field.description or "", 118, initial_indent=margin, subsequent_indent=margin)
        )
        if isinstance(value, BaseModel):
            blocks.append(f"{comment}\n{indent}{name}:\n{described(value, indent + '  ')}")
        else:
            [shown] = section.model_dump(mode="json", include={name}).values()
            text = yaml.safe_dump(shown, default_flow_style=True, allow_unicode=True, width=10_000)
            blocks.append(f"{comment}\n{indent}{name}: {text.removesuffix('...' + chr(10)).rstrip()}\n")
    return "".join(blocks)
