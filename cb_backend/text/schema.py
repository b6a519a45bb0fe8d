"""JSON schemas that clients send: their size, their form, and what of them are mere annotations.

Nothing here compiles a pattern or does more work than a bound: a schema is measured before anything else reads it.
Patterns are left to the grammar library, whose dialect is the one that counts, and only where a call is forced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import RequestError, shown

MAX_SCHEMA_DEPTH = 64

_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")

# The values of `format` that the grammar library enforces. JSON Schema leaves the keyword an annotation, and what
# describes Python's types writes others ("path", "password", "binary"): these are left out of what is compiled.
_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)

_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_ONE_SCHEMA = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_LIST_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")


def larger_than(value: Any, limit: int) -> bool:
    """Whether a JSON value takes more than about `limit` bytes; looks at no more of it than that."""
    total, rest = 0, [value]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            total += 2 + (len(one) if len(one) > limit or one.isascii() else len(one.encode(errors="replace")))
        elif isinstance(one, Mapping):
            total += 2 + 4 * len(one)
            if total <= limit:
                rest += one.keys()
                rest += one.values()
        elif isinstance(one, (list, tuple)):
            total += 2 + 2 * len(one)
            if total <= limit:
                rest += one
        if total > limit:
            return True
    return False


def check_schema(schema: Any, path: tuple[str | int, ...]) -> None:
    """
    Raises:
        RequestError: names the first part that is no JSON schema: it would otherwise show only when a model is forced
            to write by the schema, or never.
    """
    rest: list[tuple[Any, tuple[str | int, ...], int]] = [(schema, path, 0)]
    while rest:
        one, where, depth = rest.pop()
        if isinstance(one, bool):
            continue
        if not isinstance(one, Mapping):
            raise RequestError(f"must be a JSON schema (got {shown(one)})", path=where)
        if depth > MAX_SCHEMA_DEPTH:
            raise RequestError(f"nested more than {MAX_SCHEMA_DEPTH} deep", path=path)
        _check_keywords(one, where)
        rest += [(inner, (*where, *more), depth + 1) for more, inner in reversed(list(_inner(one)))]


def _check_keywords(schema: Mapping[str, Any], where: tuple[str | int, ...]) -> None:
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in _TYPES:
            raise RequestError(f"must be one of {', '.join(_TYPES)} (got {shown(kind)})", path=(*where, "type"))
    for field in ("pattern", "format"):
        if not isinstance(schema.get(field, ""), str):
            raise RequestError(f"must be a string (got {shown(schema[field])})", path=(*where, field))
    for field in _SCHEMAS_BY_NAME:
        if not isinstance(schema.get(field, {}), Mapping):
            raise RequestError("must be an object", path=(*where, field))
    for field in _LIST_OF_SCHEMAS:
        if not isinstance(schema.get(field, []), list):
            raise RequestError("must be a list of JSON schemas", path=(*where, field))


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The schemas in a schema, each with its way from there."""
    for field in _SCHEMAS_BY_NAME:
        if isinstance(schema.get(field), Mapping):
            yield from (((field, key), value) for key, value in schema[field].items())
    for field in _ONE_SCHEMA:
        if field in schema and not isinstance(schema[field], list):
            yield (field,), schema[field]
    for field in (*_LIST_OF_SCHEMAS, "items"):
        if isinstance(schema.get(field), list):
            yield from (((field, i), value) for i, value in enumerate(schema[field]))


def without_annotations(schema: Any) -> Any:
    """The schema without the values of `format` that nothing enforces. Data (`const`, `enum`) are left alone.

    Raises:
        RecursionError: it is nested too deeply.
    """
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: value for key, value in schema.items() if key != "format" or value in _FORMATS}
    for field in _SCHEMAS_BY_NAME:
        if isinstance(kept.get(field), Mapping):
            kept[field] = {key: without_annotations(value) for key, value in kept[field].items()}
    for field in _ONE_SCHEMA:
        if isinstance(kept.get(field), Mapping):
            kept[field] = without_annotations(kept[field])
    for field in (*_LIST_OF_SCHEMAS, "items"):
        if isinstance(kept.get(field), list):
            kept[field] = [without_annotations(value) for value in kept[field]]
    return kept
