"""Calls as tags, one per argument, with bare values: Qwen3-Coder, GLM-4.5 to 4.7, MiniMax M2.

    <tool_call>\n<function=f>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>           Qwen3-Coder
    <tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>                     GLM
    <minimax:tool_call>\n<invoke name="f">\n<parameter name="city">Rome</parameter>\n</invoke>\n</minimax:tool_call>

A text is handed on as it comes; every other value when it is whole. The grammar that forces a call takes the arguments
in the order of the schema, and leaves texts free but for an `enum`: their `pattern` and lengths are not enforced.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import RequestError
from .base import CallFormat, Calls, Function, Literal, calls_rule
from .values import is_text, properties, required, to_json, within


@dataclass(frozen=True, slots=True)
class Markup(CallFormat):
    """The markers, in the order in which they stand. `line`: a line break after the opening of a value, and one before
    its end, belong to the tags. A `key_end` with a space after it: the value has an opening tag of its own."""

    call: str = ""  # before the name; "": the name follows the opening
    name_end: str = ""
    key: str = ""  # before an argument's name
    key_end: str = ""  # between an argument's name and its value
    value_end: str = ""
    call_end: str = ""  # after the arguments
    end: str = ""  # after the calls; "": `call_end` ends the section
    line: bool = False
    repeated: bool = True  # the opening stands before each call

    def read(self, calls: Calls, opening: str) -> Generator[None, None, bool]:
        cursor = calls.cursor
        count = 0
        while True:
            char = yield from cursor.space()
            if count and not char:
                return True
            told = not self.call or (opening == self.call and not count)
            if not told and (yield from cursor.at(self.call)) is None:
                break
            if not (yield from self._call(calls)):
                return False
            count += 1
            cursor.mark()
            if not self.end:
                return True
        if not count:
            return False
        return opening == self.call or (yield from cursor.at(self.end)) is not None

    def _call(self, calls: Calls) -> Generator[None, None, bool]:
        cursor = calls.cursor
        if self.call:
            name, found = yield from cursor.text_until(self.name_end)
        else:  # a name ends where the first argument or the end of the call begins
            name, found = yield from cursor.text_until(self.key, self.call_end)
        name = name.strip()
        if found is None or not calls.known(name):
            return False
        calls.start(name)
        calls.arguments("{")
        schemas = properties(calls.parameters(name))
        count = 0
        while True:
            if not (found == self.key and not count and not self.call):
                if found == self.call_end:
                    break
                yield from cursor.space()
                found = yield from cursor.at(self.key, self.call_end)
                if found != self.key:
                    if found is None and not cursor.ended:  # the model forgot the end, or writes something else
                        break
                    if found is None:
                        return True
                    continue
            if not (yield from self._argument(calls, schemas, first=count == 0)):
                return True
            count += 1
            found = None
        calls.arguments("}")
        return True

    def _argument(self, calls: Calls, schemas: Mapping[str, Any], first: bool) -> Generator[None, None, bool]:
        cursor = calls.cursor
        key, found = yield from cursor.text_until(self.key_end.strip())
        if found is None:
            return False
        if self.key_end.endswith(" "):  # GLM: a tag of its own begins the value
            yield from cursor.space()
            if (yield from cursor.at(_GLM_VALUE)) is None:
                return False
        key = key.strip()
        calls.arguments(("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        schema = schemas.get(key)
        if is_text(schema):
            text = _Escaped(calls, self.line)
            found = yield from cursor.until((self.value_end,), text.add)
            if found is not None:
                text.finish()
            return found is not None
        value, found = yield from cursor.text_until(self.value_end)
        if found is None:
            return False
        if self.line:
            value = value.removeprefix("\n").removesuffix("\n")
        calls.arguments(to_json(value, schema))
        return True

    def grammar(self, functions: Sequence[Function], parallel: bool, literal: Literal) -> list[str]:
        opening = self.openings[0] + ("\n" if self.call else "")
        line = "\n" if self.line else ""
        if self.repeated:
            tail = self.call_end + ("\n" + self.end if self.end else "")
            rule = calls_rule(literal(opening), "call", literal("\n" + opening), "", parallel)
        else:
            tail = self.call_end + "\n"
            rule = calls_rule(literal(opening), "call", "", literal(self.end), parallel)
        rules = [f"start: {rule}", "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
        close = self.value_end
        rules.append(f"text[suffix={json.dumps(line + close + chr(10))}]: /(?s:.*)/")
        for i, function in enumerate(functions):
            refuse_unlisted(function, self.name)
            parts = [literal(self.call + function.name + (self.name_end if self.call else "") + "\n")]
            for j, (key, schema) in enumerate(properties(function.schema).items()):
                value_begin = _GLM_VALUE if self.key_end.endswith(" ") else ""
                head = self.key + key + self.key_end.strip() + ("\n" + value_begin if value_begin else "") + line
                ended = literal(line + close + "\n")
                if not is_text(schema):
                    rules.append(f"v_{i}_{j}: %json {json.dumps(within(function.schema, schema))}")
                    value = f"v_{i}_{j} {ended}"
                elif "enum" in schema:
                    value = "(" + " | ".join(map(literal, schema["enum"])) + f") {ended}"
                else:
                    value = "text"
                rules.append(f"a_{i}_{j}: {literal(head)} {value}")
                parts.append(f"a_{i}_{j}" + ("" if key in required(function.schema) else "?"))
            rules.append(f"call_{i}: {' '.join(parts)} {literal(tail)}")
        return rules


_GLM_VALUE = "<arg_value>"


class _Escaped:
    """A text as a JSON string, piece by piece, without the line breaks that belong to the tags around it."""

    def __init__(self, calls: Calls, line: bool) -> None:
        self._calls = calls
        self._line = line
        self._begun = False
        self._held = ""

    def add(self, piece: str) -> None:
        if not piece:
            return
        if not self._begun:
            self._begun = True
            self._calls.arguments('"')
            piece = piece.removeprefix("\n") if self._line else piece
        piece = self._held + piece
        self._held = "\n" if self._line and piece.endswith("\n") else ""
        shown = piece.removesuffix(self._held) if self._held else piece
        if shown:
            self._calls.arguments(json.dumps(shown, ensure_ascii=False)[1:-1])

    def finish(self) -> None:
        self._calls.arguments('"' if self._begun else '""')


def refuse_unlisted(function: Function, format_name: str) -> None:
    """
    Raises:
        RequestError: the arguments are told otherwise than by `properties`, which is all this format can force.
    """
    told = [key for key in ("anyOf", "oneOf", "allOf", "$ref") if key in function.schema]
    if told:
        raise RequestError(
            f"{function.name!r} tells its parameters by {told[0]!r}, by which the call format of this model, "
            f"{format_name}, cannot be forced: list them in 'properties', or use tool_choice 'auto'",
            path=("response_format",),
        )
