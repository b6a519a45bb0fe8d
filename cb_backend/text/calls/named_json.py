"""Calls as a name and then the arguments as JSON, between markers that are special tokens in most tokenizers.

[TOOL_CALLS]name[ARGS]{...}                                                              Mistral since Tekken v11
<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    <|tool_calls_section_end|>                                                           Kimi K2
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
    <｜tool▁calls▁end｜>                                                                  DeepSeek V3.1
the same with `function<｜tool▁sep｜>name`, and the arguments in a block of code         DeepSeek V3, R1
<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>        gpt-oss (harmony)
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from .base import CallFormat, Calls, Function, Literal, calls_rule


@dataclass(frozen=True, slots=True)
class NamedJson(CallFormat):
    """`call`: what begins a call after the opening, "" if the opening does. `separator`: between name and arguments.
    `close`: ends a call; `end`: ends them all. `header`: what stands between `call` and `separator`, with the group
    `name` and perhaps `ident`. `template`: the same as a forced answer writes it, with `{name}` and `{index}`."""

    call: str = ""
    separator: str = ""
    close: str = ""
    end: str = ""
    header: re.Pattern[str] = re.compile(r"(?P<name>.*)")
    template: str = "{name}"

    def read(self, calls: Calls, opening: str) -> Generator[None, None, bool]:
        cursor = calls.cursor
        count = 0
        while True:
            if self.call:
                yield from cursor.space()
                if (yield from cursor.at(self.call)) is None:
                    break
            elif count:
                return True
            header, found = yield from cursor.text_until(self.separator)
            match = self.header.fullmatch(header.strip())
            if found is None or match is None or not calls.known(match["name"]):
                return False
            if (yield from cursor.space()) != "{":
                return False
            calls.start(match["name"], match.groupdict().get("ident"))
            count += 1
            whole = yield from cursor.json_value(calls.arguments)
            cursor.mark()
            if not whole or not self.close:
                return True
            yield from cursor.space("`" if "`" in self.separator else "")
            if (yield from cursor.at(self.close)) is None:
                return False
            cursor.mark()
        if not count:
            return False
        return not self.end or not cursor.buffer or (yield from cursor.at(self.end)) is not None

    def grammar(self, functions: Sequence[Function], parallel: bool, literal: Literal) -> list[str]:
        first = self.openings[0]
        close = "\n```" + self.close if "`" in self.separator else self.close
        if self.call:
            start = calls_rule(literal(first), "call", "", literal(self.end), parallel)
        else:  # each call has the opening before it; after the one of gpt-oss its answer ends
            start = calls_rule("", "call", "", "", parallel and not close)
        rules = [f"start: {start}", "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
        for i, function in enumerate(functions):
            head = (self.call or first) + self.template.format(name=function.name, index=0)
            parts = [literal(head + self.separator), f"args_{i}"]
            # What ends a call of gpt-oss is an end token, which the grammar's end allows.
            parts += [literal(close)] if self.call else []
            rules += [f"call_{i}: {' '.join(parts)}", f"args_{i}: %json {json.dumps(function.schema)}"]
        return rules
