"""What a client may write in `response_format`: every key at every depth is known, or the request is refused.

A key that nothing reads is a wish that nothing grants: `"scheme"` for `"schema"` would leave the answer free with no
word about it. What is meant beyond doubt is done: `{"type": "json_object", "schema": ...}` is a schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import RequestError, shown

KEYS: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema",),
    "regex": ("regex",),
    "choice": ("choice",),
    "grammar": ("grammar",),
}
_JSON_SCHEMA_KEYS = ("name", "description", "schema", "strict")


def checked(response_format: Mapping[str, Any]) -> dict[str, Any]:
    """The format with a known type and known keys, a schema always under `json_schema`; null is absent.

    Raises:
        RequestError: names the key at fault, below `response_format`.
    """
    given = {key: value for key, value in response_format.items() if value is not None}
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in KEYS:
        *some, last = KEYS
        raise _refuse(f"type must be {', '.join(some)} or {last} (got {shown(kind)})")
    for key in given:
        if key != "type" and key not in KEYS[kind]:
            raise _refuse(f"type {shown(kind)} takes no such key{_hint(kind, key)}", key)
    if kind == "json_object" and "schema" in given:
        return {"type": "json_schema", "json_schema": {"schema": _schema(given["schema"], "schema")}}
    if kind == "json_schema":
        return {"type": kind, "json_schema": _json_schema(given.get("json_schema"))}
    return given


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A format as the Responses API writes it, the schema's fields beside `type`, as chats nest it.

    Raises:
        RequestError: names the key at fault, below `text.format`.
    """
    try:
        if flat.get("type") != "json_schema":
            return checked(flat)
        if flat.get("schema") is None:
            raise _refuse("needs a 'schema' beside 'type'", *(("json_schema",) if "json_schema" in flat else ()))
        return {"type": "json_schema", "json_schema": _json_schema({k: v for k, v in flat.items() if k != "type"})}
    except RequestError as error:
        field = error.path[1:]
        raise error.at("text", "format", *(field[1:] if field[:1] == ("json_schema",) else field)) from None


def _json_schema(outer: Any) -> dict[str, Any]:
    if not isinstance(outer, Mapping):
        raise _refuse("json_schema must be an object with a schema", "json_schema")
    given = {key: value for key, value in outer.items() if value is not None}
    for key in given:
        if key not in _JSON_SCHEMA_KEYS:
            raise _refuse("no such key here; the schema itself goes under 'schema'", "json_schema", str(key))
    for key, kind, what in (("name", str, "string"), ("description", str, "string"), ("strict", bool, "boolean")):
        if key in given and not isinstance(given[key], kind):
            raise _refuse(f"must be a {what} (got {shown(given[key])})", "json_schema", key)
    if "schema" not in given:
        raise _refuse("required: without a schema the answer would be free", "json_schema", "schema")
    return {**given, "schema": _schema(given["schema"], "json_schema", "schema")}


def _schema(schema: Any, *path: str) -> Any:
    if not isinstance(schema, (Mapping, bool)):
        raise _refuse(f"must be a JSON schema (got {shown(schema)})", *path)
    return schema


def _hint(kind: str, key: Any) -> str:
    if kind == "json_schema" and key in _JSON_SCHEMA_KEYS:
        return "; it goes inside 'json_schema'"
    owners = [name for name, keys in KEYS.items() if key in keys]
    return f"; type {owners[0]!r} does" if owners else ""


def _refuse(reason: str, *field: str) -> RequestError:
    return RequestError(reason, path=("response_format", *field))
