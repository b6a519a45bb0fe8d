"""Whether every `oneOf` of a JSON schema means the same as `anyOf`: no value fits two of its branches.

The grammar library takes `oneOf` where it sees that by itself, which it does not through references; told that the two
are the same (`coerce_one_of`), it takes all. What is not shown here to exclude each other may not be told so: the text
could fit two branches, and then it would not fit the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

# What a proof may cost, in units of about a microsecond. More is the work of a schema that was made to cost time: then
# nothing is shown. What is found out about one schema (its parts, types, values) is kept and costs once.
MAX_WORK = 200_000
_MAX_DEPTH = 8
_MAX_PARTS = 16
_ALL = frozenset(("null", "boolean", "number", "string", "array", "object"))


def branches_exclude_each_other(schema: Any) -> bool:
    """True if it is shown for every `oneOf` in the schema; so also if there is none."""
    return Proof(schema).shown()


class _TooMuchWork(Exception):
    pass


class Proof:
    """Shows that schemas have no value in common. All answers err on the side of False.

    Attributes:
        work: what it cost so far, at most a little over MAX_WORK.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self.work = 0
        self._found_parts: dict[int, list[Mapping[str, Any]]] = {}
        self._found_types: dict[int, frozenset[str]] = {}
        self._found_values: dict[int, frozenset[Any]] = {}

    def shown(self) -> bool:
        try:
            return self._every_one_of()
        except _TooMuchWork:
            return False

    def _spend(self, units: int) -> None:
        self.work += units
        if self.work > MAX_WORK:
            raise _TooMuchWork

    def _every_one_of(self) -> bool:
        rest = [self._root]
        while rest:
            one = rest.pop()
            self._spend(1)
            if isinstance(one, Mapping):
                branches = one.get("oneOf")
                if isinstance(branches, list) and not all(self._exclude(a, b) for a, b in combinations(branches, 2)):
                    return False
                rest += one.values()
            elif isinstance(one, list):
                # Numbers and texts hold no schema, and a long enum has thousands.
                rest += [inner for inner in one if isinstance(inner, (Mapping, list))]
                self._spend(len(one) // 16)
        return True

    def _exclude(self, a: Any, b: Any, depth: int = 0) -> bool:
        self._spend(5)
        if depth > _MAX_DEPTH:
            return False
        if a is False or b is False:
            return True
        return any(self._parts_exclude(x, y, depth) for x in self._parts(a) for y in self._parts(b))

    def _parts(self, schema: Any) -> list[Mapping[str, Any]]:
        """Schemas that a value of `schema` must all fit: itself, what it refers to, and what it lists under `allOf`."""
        found = self._found_parts.get(id(schema))
        if found is not None:
            return found
        parts: list[Mapping[str, Any]] = []
        rest = [schema]
        while rest and len(parts) < _MAX_PARTS:
            one = rest.pop()
            if isinstance(one, Mapping):
                parts.append(one)
                rest += [self._target(one["$ref"])] if "$ref" in one else []
                rest += one["allOf"][:_MAX_PARTS] if isinstance(one.get("allOf"), list) else []
        self._found_parts[id(schema)] = parts
        return parts

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        self._spend(1 + len(reference) // 16)
        found = self._root
        for key in reference[2:].split("/"):
            found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found

    def _parts_exclude(self, a: Mapping[str, Any], b: Mapping[str, Any], depth: int) -> bool:
        self._spend(3)
        common = self._types(a) & self._types(b)
        if not common:
            return True
        mine, theirs = self._values(a), self._values(b)
        if mine is not None and theirs is not None:
            self._spend(min(len(mine), len(theirs)) // 16)
            if mine.isdisjoint(theirs):
                return True
        for one, other in ((a, b), (b, a)):
            for key in ("anyOf", "oneOf"):
                inner = one.get(key)
                if isinstance(inner, list) and inner and all(self._exclude(x, other, depth + 1) for x in inner):
                    return True
        return common == {"object"} and self._objects_exclude(a, b, depth)

    def _objects_exclude(self, a: Mapping[str, Any], b: Mapping[str, Any], depth: int) -> bool:
        for one, other in ((a, b), (b, a)):
            mine, theirs = _mapping(one, "properties"), _mapping(other, "properties")
            closed = other.get("additionalProperties") is False and "patternProperties" not in other
            required = one.get("required")
            for name in required if isinstance(required, list) else ():
                self._spend(1)
                if not isinstance(name, str):
                    continue
                if name not in theirs:
                    if closed:
                        return True  # the one must have it, the other must not
                elif self._exclude(mine.get(name, True), theirs[name], depth + 1):
                    return True
        return False

    def _types(self, schema: Mapping[str, Any]) -> frozenset[str]:
        """An integer is a number too."""
        known = self._found_types.get(id(schema))
        if known is not None:
            return known
        kinds = schema.get("type", _ALL)
        named = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, (list, frozenset)) else ()
        found = frozenset("number" if kind == "integer" else kind for kind in named if isinstance(kind, str))
        values = _listed(schema)
        if values is not None:
            self._spend(len(values) // 4)
            found &= frozenset(map(_type_of, values))
        self._found_types[id(schema)] = found
        return found

    def _values(self, schema: Mapping[str, Any]) -> frozenset[Any] | None:
        """All values that fit, if the schema lists them. Python takes 1 and True for equal: that errs safely."""
        values = _listed(schema)
        if values is None:
            return None
        known = self._found_values.get(id(schema))
        if known is None:
            known = self._found_values[id(schema)] = frozenset(self._frozen(value) for value in values)
        return known

    def _frozen(self, value: Any) -> Any:
        """The value, or what is equal for equal lists and objects and can be hashed."""
        if isinstance(value, str):
            self._spend(1 + len(value) // 1024)
            return value
        self._spend(1)
        if isinstance(value, Mapping):
            return frozenset((key, self._frozen(inner)) for key, inner in value.items())
        return tuple(self._frozen(inner) for inner in value) if isinstance(value, list) else value


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
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
