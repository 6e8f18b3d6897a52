"""From a preset, a file and assignments to one checked configuration."""

from __future__ import annotations

from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from traceforge_core.config.settings_yaml import NOT_YAML, read_yaml
from traceforge_core.config.tree import RunConfig
from traceforge_core.errors import TraceForgeError

DEFAULT_PRESET = "tiny-cpu"


def preset_names() -> list[str]:
    """Names of the shipped presets, sorted."""
    folder = resources.files("traceforge_core") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_config(preset: str | None = None, file: Path | None = None, assignments: list[str] | None = None) -> RunConfig:
    """The preset, with the file's fields laid over it, then each `section.field=value` assignment (value is YAML).

    preset: None means the one that the file names (`preset: NAME`), else the default. Raises TraceForgeError naming the
    field and what is allowed.
    """
    upper = _read_config_file(file) if file is not None else {}
    chosen = preset or upper.get("preset") or DEFAULT_PRESET
    if chosen not in preset_names():
        where = f" ({file})" if chosen != preset and file is not None else ""
        raise TraceForgeError(f"There is no preset {chosen!r}{where}. Presets: {', '.join(preset_names())}.")
    preset_text = (resources.files("traceforge_core") / "presets" / f"{chosen}.yaml").read_text(encoding="utf-8")
    tree: dict[str, Any] = read_yaml(preset_text) or {}
    _lay_over(tree, {name: value for name, value in upper.items() if name != "preset"})
    for assignment in assignments or []:
        _lay_over(tree, _parse_assignment(assignment))
    return validate_config(tree)


def preset_in(file: Path | None) -> str | None:
    """The preset that a config file names; None where it names none. Raises TraceForgeError where it cannot be read."""
    return _read_config_file(file).get("preset") if file is not None else None


def lay_over(config: RunConfig, upper: RunConfig | None = None, assignments: list[str] | None = None) -> RunConfig:
    """A configuration with the fields given in `upper` (not its defaults), then assignments, laid over it."""
    tree = config.model_dump(mode="json")
    if upper is not None:
        _lay_over(tree, upper.model_dump(mode="json", exclude_unset=True))
    for assignment in assignments or []:
        _lay_over(tree, _parse_assignment(assignment))
    return validate_config(tree)


def validate_config(tree: dict[str, Any]) -> RunConfig:
    """A RunConfig from plain data. Raises TraceForgeError with one line a wrong field."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"]) or "config"
            if problem["type"] == "extra_forbidden":
                lines.append(f"  {where}: no such field. Fields there: {', '.join(_fields_at(problem['loc'][:-1]))}")
            elif problem["type"] == "model_type":
                inside = ", ".join(_fields_at(problem["loc"]))
                lines.append(f"  {where}: is a section (given: {problem['input']!r}). Fields there: {inside}")
            else:
                told = problem["msg"].removeprefix("Value error, ") + _how_to_write(problem["type"], problem["input"])
                lines.append(f"  {where}: {told} (given: {problem['input']!r})")
        raise TraceForgeError("The configuration is wrong:\n" + "\n".join(lines)) from None


def _how_to_write(problem: str, given: Any) -> str:
    if problem == "string_type" and isinstance(given, int | float | date):  # a bare yes is truth, 2024-01-01 a date
        return ": write it in quotes"
    if problem == "list_type" and isinstance(given, str):
        return f": write it in brackets, [{given}]"
    return ""


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    section: type[BaseModel] = RunConfig
    for name in location:
        annotation = section.model_fields[str(name)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        section = annotation
    return list(section.model_fields)


def _read_config_file(file: Path) -> dict[str, Any]:
    try:
        tree = read_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceForgeError(f"Cannot read the config file {file}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise TraceForgeError(f"The config file {file} is not UTF-8 text: {error}. Save it as UTF-8.") from None
    except NOT_YAML as error:
        told = str(error).replace('in "<unicode string>", ', "at ")
        tabs = "\nIndent with spaces: YAML takes no tabs there." if r"found character '\t'" in told else ""
        raise TraceForgeError(f"The config file {file} is not valid YAML: {told}{tabs}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise TraceForgeError(
            f"The config file {file} must hold sections (ingest:, model:, ...), not a {type(tree).__name__}."
        )
    return _without_empty_sections(tree, RunConfig)


def _without_empty_sections(tree: dict[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """YAML reads a section whose lines are all commented out as null; it means that nothing differs there."""
    kept = {}
    for name, value in tree.items():
        field = section.model_fields.get(name)
        inner = field.annotation if field else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            if value is None:
                continue
            value = _without_empty_sections(value, inner) if isinstance(value, dict) else value
        kept[name] = value
    return kept


def _parse_assignment(assignment: str) -> dict[str, Any]:
    name, equals, text = assignment.partition("=")
    if not equals or not name.strip():
        raise TraceForgeError(f"--set takes section.field=value, such as ingest.path=~/logs (given: {assignment!r}).")
    try:
        value = read_yaml(text)
        if isinstance(value, str):
            value = float(value) if _is_plain_exponent(value) else value
    except NOT_YAML:
        value = text
    parts = name.strip().split(".")
    quoted = isinstance(value, str) and text.lstrip()[:1] in ("'", '"')
    if _is_text(parts) and not quoted and text.strip() not in ("", "null", "~"):
        value = text.strip()  # also a folder 2024-01-01, a commit 12e4567, logs #2
    tree: Any = value
    for part in reversed(parts):
        tree = {part: tree}
    whole: dict[str, Any] = tree
    return whole


def _is_text(parts: list[str]) -> bool:
    """Whether the field takes text, whatever YAML reads in it."""
    annotation: Any = RunConfig
    for part in parts:
        fields = annotation.model_fields if isinstance(annotation, type) and issubclass(annotation, BaseModel) else {}
        annotation = fields[part].annotation if part in fields else None
    return annotation in (str, str | None)


def _is_plain_exponent(text: str) -> bool:
    """YAML 1.1 reads 1e-5 as text (it wants 1.0e-5); people write 1e-5."""
    mantissa, e, exponent = text.lower().partition("e")
    return bool(e) and mantissa.lstrip("+-").isdigit() and exponent.lstrip("+-").isdigit()


def _lay_over(tree: dict[str, Any], upper: dict[str, Any]) -> None:
    for name, value in upper.items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            _lay_over(tree[name], value)
        else:
            tree[name] = value
