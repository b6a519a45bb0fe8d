"""Whether every `oneOf` of a JSON schema means the same as `anyOf`: no value fits two of its branches.

The grammar library takes `oneOf` where it sees that by itself, which it does not through references; told that the two
are the same (`coerce_one_of`), it takes all. What is not shown here to exclude each other may not be told so: the text
could fit two branches, and then it would not fit the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

# Comparisons of two schemas. More are the work of a schema that was made to cost time: then nothing is shown.
_MAX_COMPARISONS = 20_000
_MAX_DEPTH = 8
_ALL = frozenset(("null", "boolean", "number", "string", "array", "object"))


def branches_exclude_each_other(schema: Any) -> bool:
    """True if it is shown for every `oneOf` in the schema; so also if there is none."""
    proof = _Proof(schema)
    rest = [schema]
    while rest:
        one = rest.pop()
        if isinstance(one, Mapping):
            branches = one.get("oneOf")
            if isinstance(branches, list) and not all(proof.exclude(a, b) for a, b in combinations(branches, 2)):
                return False
            rest += one.values()
        elif isinstance(one, list):
            rest += one
    return True


class _Proof:
    """Shows that two schemas have no value in common. All answers err on the side of False."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MAX_COMPARISONS

    def exclude(self, a: Any, b: Any, depth: int = 0) -> bool:
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0:
            return False
        if a is False or b is False:
            return True
        return any(self._exclude(x, y, depth) for x in self._parts(a) for y in self._parts(b))

    def _parts(self, schema: Any) -> list[Mapping[str, Any]]:
        """Schemas that a value of `schema` must all fit: itself, what it refers to, and what it lists under `allOf`."""
        parts: list[Mapping[str, Any]] = []
        rest = [schema]
        while rest and len(parts) < 16:
            one = rest.pop()
            if isinstance(one, Mapping):
                parts.append(one)
                rest += [self._target(one["$ref"])] if "$ref" in one else []
                rest += one["allOf"] if isinstance(one.get("allOf"), list) else []
        return parts

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        found = self._root
        for key in reference[2:].split("/"):
            found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found

    def _exclude(self, a: Mapping[str, Any], b: Mapping[str, Any], depth: int) -> bool:
        if not _types(a) & _types(b):
            return True
        values = _values(a), _values(b)
        if values[0] is not None and values[1] is not None and not any(x == y for x in values[0] for y in values[1]):
            return True
        for one, other in ((a, b), (b, a)):
            for key in ("anyOf", "oneOf"):
                inner = one.get(key)
                if isinstance(inner, list) and inner and all(self.exclude(x, other, depth + 1) for x in inner):
                    return True
        return _types(a) & _types(b) == {"object"} and self._exclude_objects(a, b, depth)

    def _exclude_objects(self, a: Mapping[str, Any], b: Mapping[str, Any], depth: int) -> bool:
        for one, other in ((a, b), (b, a)):
            mine, theirs = _mapping(one, "properties"), _mapping(other, "properties")
            closed = other.get("additionalProperties") is False and "patternProperties" not in other
            required = one.get("required")
            for name in required if isinstance(required, list) else ():
                if not isinstance(name, str):
                    continue
                if name not in theirs:
                    if closed:
                        return True  # the one must have it, the other must not
                elif self.exclude(mine.get(name, True), theirs[name], depth + 1):
                    return True
        return False


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """An integer is a number too."""
    kinds = schema.get("type", _ALL)
    named = [kinds] if isinstance(kinds, str) else kinds
    found = frozenset("number" if kind == "integer" else kind for kind in named if isinstance(kind, str))
    values = _values(schema)
    return found if values is None else found & frozenset(map(_type_of, values))


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """All values that fit, if the schema lists them."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((str, "string"), ((int, float), "number"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def _mapping(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}
