"""How JSON is written by a grammar, in the words of the grammar library; imports neither it nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .one_of import branches_exclude_each_other

# One line, spaced as most JSON that models have read. With free white space a small model may indent without end;
# without the space after a colon it continues as if it had never seen JSON.
JSON_STYLE: Mapping[str, Any] = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}


def style(schema: Any) -> dict[str, Any]:
    """The library's options for a schema: how its JSON is written, and whether its `oneOf` may be taken as `anyOf`."""
    return {**JSON_STYLE, "coerce_one_of": branches_exclude_each_other(schema)}
