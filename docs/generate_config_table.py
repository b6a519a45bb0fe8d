"""Writes the configuration table of README.md from `EngineConfig`: `python docs/generate_config_table.py`.

The table lies between two marker comments. A test compares it with what this module renders, so that the README cannot
tell of a field that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cb_backend.config import EngineConfig

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- configuration: begin (docs/generate_config_table.py) -->", "<!-- configuration: end -->"
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"))


def render() -> str:
    """The table in Markdown, one row per field, nested fields with dots."""
    rows = ["| Field | Environment | Default | Meaning |", "|---|---|---|---|"]
    for path, field in _fields(EngineConfig, ()):
        variable = "CB_" + "__".join(path).upper()
        meaning = " ".join((field.description or "").split())
        rows.append(f"| `{'.'.join(path)}` | `{variable}` | {_default(path, field)} | {_choices(field)}{meaning} |")
    return "\n".join(rows)


def _fields(section: type[BaseModel], prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, (*prefix, name))
        else:
            yield (*prefix, name), field


def _default(path: tuple[str, ...], field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.default
    if value is None:
        return "none"
    if path[-1] in ("swap_space", "kv_cache_memory"):
        size, unit = next((size, unit) for size, unit in _UNITS if value % size == 0)
        return f"`{value // size}{unit}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _choices(field: FieldInfo) -> str:
    """The values of a choice, unless its description goes through them already."""
    if get_origin(field.annotation) is not Literal:
        return ""
    values = [f"`{value}`" for value in get_args(field.annotation)]
    described = field.description or ""
    return "" if all(value in described for value in values) else f"One of {', '.join(values)}. "


def updated(readme: str) -> str:
    """`readme` with the table between the markers replaced.

    Raises:
        ValueError: the markers are not there.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks the markers {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{render()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
