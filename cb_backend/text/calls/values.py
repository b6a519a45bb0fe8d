"""Values that a model writes bare between tags, to JSON: the schema says whether `5` is a text or a number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .json_objects import loaded


def is_text(schema: Any) -> bool:
    """Whether a value of the schema can only be a text."""
    if not isinstance(schema, Mapping):
        return False
    if schema.get("type") in ("string", ["string"]):
        return True
    listed = schema.get("enum")
    return isinstance(listed, list) and bool(listed) and all(isinstance(value, str) for value in listed)


def to_json(text: str, schema: Any) -> str:
    """What stands for anything but a text is JSON already; what is no JSON is a text."""
    if is_text(schema):
        return json.dumps(text, ensure_ascii=False)
    stripped = text.strip()
    lowered = {"True": "true", "False": "false", "None": "null"}.get(stripped, stripped)
    value = loaded(lowered)
    if value is None and lowered != "null":
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()


def properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def required(schema: Mapping[str, Any]) -> frozenset[str]:
    found = schema.get("required")
    return frozenset(name for name in found if isinstance(name, str)) if isinstance(found, list) else frozenset()


def within(whole: Mapping[str, Any], part: Any) -> Any:
    """The schema of one argument, with what it may refer to."""
    if not isinstance(part, Mapping):
        return part
    kept = {key: whole[key] for key in ("$defs", "definitions", "x-guidance") if key in whole}
    return {**part, **kept}
