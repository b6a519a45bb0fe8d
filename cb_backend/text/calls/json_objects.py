"""Calls as JSON objects with a name and arguments: Hermes, Llama 3, Mistral's first, Granite, Phi-4.

<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>        Hermes, Qwen
{"name": ..., "parameters": {...}}                                 Llama 3
[TOOL_CALLS][{"name": ..., "arguments": {...}}]                    Mistral before Tekken v11
<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>     Phi-4; Granite without the closing tag
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from .base import CallFormat, Calls, Function, Literal, calls_rule

_BETWEEN = ",;"
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class JsonObjects(CallFormat):
    """`begin`, `separator`, `end`: what a forced answer holds around its calls. `closing`: what ends one call, or the
    list of them if they are `listed`. `key`: the arguments' own."""

    begin: str = ""
    separator: str = ""
    end: str = ""
    closing: str = ""
    key: str = "arguments"
    listed: bool = False

    def read(self, calls: Calls, opening: str) -> Generator[None, None, bool]:
        cursor = calls.cursor
        if (yield from cursor.space()) == "[" and self.listed:
            cursor.take(1)
        count = 0
        while True:
            char = yield from cursor.space(_BETWEEN)
            if char == "{":
                if not (yield from read_object(calls)):
                    return False
                count += 1
                cursor.mark()
                continue
            if not count:
                return False
            if not char:
                return True
            if self.listed:
                closed = yield from cursor.at("]")
                if closed and self.closing:
                    yield from cursor.space()
                    yield from cursor.at(self.closing)
                return closed is not None
            return bool(self.closing) and (yield from cursor.at(self.closing)) is not None

    def grammar(self, functions: Sequence[Function], parallel: bool, literal: Literal) -> list[str]:
        begin, separator, end = (literal(text) if text else "" for text in (self.begin, self.separator, self.end))
        rules = [f"start: {calls_rule(begin, 'call', separator, end, parallel)}"]
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
        for i, function in enumerate(functions):
            head = f'{{"name": {json.dumps(function.name)}, "{self.key}": '
            rules.append(f'call_{i}: {json.dumps(head)} args_{i} "}}"')
            rules.append(f"args_{i}: %json {json.dumps(function.schema)}")
        return rules


def read_object(calls: Calls) -> Generator[None, None, bool]:
    """One object with a name and arguments, which are handed on as they come once the name is known."""
    cursor = calls.cursor
    cursor.take(1)
    name: Any = None
    arguments: str | None = None
    started = False
    while True:
        char = yield from cursor.space(",")
        if char == "}":
            cursor.take(1)
            break
        key = (yield from cursor.json_text()) if char == '"' else None
        if key is None or (yield from cursor.space()) != ":":
            return started  # one that does not close is taken as closed
        cursor.take(1)
        char = yield from cursor.space()
        word = loaded(key)
        if word in _ARGUMENTS and char == "{" and not started and calls.known(name):
            calls.start(name)
            started = True
            if not (yield from cursor.json_value(calls.arguments)):
                return True
            continue
        value = yield from cursor.json_text()
        if value is None:
            return started
        if word == "name" and not started:
            name = loaded(value)
            if not calls.known(name):
                return False
        elif word in _ARGUMENTS and arguments is None:
            arguments = value
    if started:
        return True
    if not calls.known(name):
        return False
    value = loaded(arguments or "null")
    if arguments is not None and value is None and arguments != "null":
        return False  # no JSON
    calls.start(name)
    calls.arguments(written(arguments, value))
    return True


def written(text: str | None, value: Any) -> str:
    """Arguments as JSON text: what a model wrote as a string holds it, and null stands for none."""
    if value is None or text is None:
        return "{}"
    # An escape in JSON may stand for half of a surrogate pair, which no answer can hold.
    return value.encode(errors="replace").decode() if isinstance(value, str) else text


def loaded(text: str) -> Any:
    """The JSON value, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
