"""Calls as a list in Python's notation: `[weather(city="Rome", days=3), time()]`.

Llama 3.2 and 4 write it, also between `<|python_start|>` and `<|python_end|>`; the same Llama 4 writes the JSON of
Llama 3 where its template asks for that, so its reader takes both. An argument is handed on when it is whole. A forced
call spells its values as JSON does, which the reader takes as well.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from .base import CallFormat, Calls, Function, Literal, calls_rule
from .json_objects import loaded, read_object
from .markup import refuse_unlisted
from .values import properties, required, within

MAX_LITERAL = 64 * 1024  # characters of one argument; a longer one stays the text that it is
_NAME = re.compile(r"[A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True)
class Pythonic(CallFormat):
    """`end`: the closing marker; `objects`: JSON objects are taken too."""

    end: str = ""
    objects: bool = False

    def read(self, calls: Calls, opening: str) -> Generator[None, None, bool]:
        cursor = calls.cursor
        char = yield from cursor.space()
        if char == "{" and self.objects:
            while char == "{":
                if not (yield from read_object(calls)):
                    return False
                cursor.mark()
                char = yield from cursor.space(",;")
        elif char == "[":
            cursor.take(1)
            if not (yield from self._list(calls)):
                return False
            yield from cursor.space()
        else:
            return False
        return not cursor.buffer or (bool(self.end) and (yield from cursor.at(self.end)) is not None)

    def _list(self, calls: Calls) -> Generator[None, None, bool]:
        cursor = calls.cursor
        while True:
            yield from cursor.space()
            name = yield from self._name(calls)
            if (yield from cursor.space()) != "(" or not calls.known(name):
                return False
            cursor.take(1)
            calls.start(name)
            calls.arguments("{")
            if not (yield from self._arguments(calls)):
                return True  # cut, or no Python: what was read of it is all there is
            calls.arguments("}")
            cursor.mark()
            char = yield from cursor.space()
            if not char:
                return True
            if char not in ",]":
                return False
            cursor.take(1)
            if char == "]":
                cursor.mark()
                return True

    def _arguments(self, calls: Calls) -> Generator[None, None, bool]:
        cursor = calls.cursor
        count = 0
        while True:
            char = yield from cursor.space(",")
            if char == ")":
                cursor.take(1)
                return True
            key = yield from self._name(calls)
            if not key or (yield from cursor.space()) != "=":
                return False
            cursor.take(1)
            yield from cursor.space()
            source = yield from self._expression(calls)
            if source is None:
                return False
            calls.arguments((", " if count else "") + json.dumps(key) + ": " + to_json(source))
            count += 1

    def _name(self, calls: Calls) -> Generator[None, None, str]:
        name = ""
        while (yield from calls.cursor.more()) and _NAME.match(calls.cursor.buffer):
            name += calls.cursor.take(1)
        return name

    def _expression(self, calls: Calls) -> Generator[None, None, str | None]:
        """The source of a value, up to the comma or bracket after it; None: the text ended within it."""
        cursor = calls.cursor
        source: list[str] = []
        depth, quote, escaped = 0, "", False
        while (yield from cursor.more()):
            char = cursor.buffer[0]
            if escaped:
                escaped = False
            elif quote:
                escaped = char == "\\"
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            elif not depth and char in ",)":
                return "".join(source)
            else:
                depth += (char in "([{") - (char in ")]}")
            source.append(cursor.take(1))
        return None

    def grammar(self, functions: Sequence[Function], parallel: bool, literal: Literal) -> list[str]:
        rules = [f"start: {calls_rule(literal('['), 'call', literal(', '), literal(']'), parallel)}"]
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
        for i, function in enumerate(functions):
            refuse_unlisted(function, self.name)
            needed = required(function.schema)
            ordered = sorted(properties(function.schema).items(), key=lambda item: item[0] not in needed)
            count = sum(key in needed for key, _ in ordered)
            for j, (key, schema) in enumerate(ordered):
                rules.append(f"a_{i}_{j}: {literal(key + '=')} v_{i}_{j}")
                rules.append(f"v_{i}_{j}: %json {json.dumps(within(function.schema, schema))}")
            given = ' ", " '.join(f"a_{i}_{j}" for j in range(count))

            def rest(first: int, i: int = i, total: int = len(ordered)) -> str:
                return " ".join(f'(", " a_{i}_{j})?' for j in range(first, total))

            if count or not ordered:
                arguments = f"{given} {rest(count)}".strip()
            else:  # which of the optional ones is the first
                arguments = "(" + " | ".join(f"a_{i}_{j} {rest(j + 1)}" for j in range(len(ordered))) + ")?"
            rules.append(f"call_{i}: {literal(function.name + '(')} {arguments} {literal(')')}")
        return rules


def to_json(source: str) -> str:
    """A value in Python's notation, or in JSON's, as JSON; what is neither is a text."""
    value: Any = loaded(source)
    if value is None and source.strip() != "null":
        try:
            value = ast.literal_eval(source.strip()) if len(source) <= MAX_LITERAL else source
            return json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="replace").decode()
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            value = source
    return json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()
