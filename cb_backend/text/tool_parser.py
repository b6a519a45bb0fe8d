"""Reads calls out of what a model writes, piece by piece, in any of the formats of text/tools.py.

    parser = ToolParser(HERMES, {"get_weather"})
    parser.push('Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"ci')
        -> [Text("Let me look."), CallStart(0, "get_weather"), CallArguments(0, '{"ci')]

How the text is cut into pieces does not change what comes out, joined. What looks like a call and is none (no JSON, no
name, a function that does not exist) stays text. White space around calls is dropped. Arguments are the model's own
characters: JSON if it wrote JSON and was not cut short.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from .tools import CallFormat


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    piece: str


Piece = Text | CallStart | CallArguments  # what a push gives, in order

# A call whose name and the key of whose arguments have come: its arguments can be sent as they come.
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BETWEEN = " \t\r\n,;"


class ToolParser:
    """The state of one choice.

    Args:
        style: how this model writes calls.
        names: the functions that exist.
    """

    def __init__(self, style: CallFormat, names: Collection[str]) -> None:
        self._style = style
        self._names = names
        self._state: Callable[[], bool] = self._in_text
        self._buffer = ""  # not yet understood
        self._raw = ""  # what becomes text again if no call follows
        self._spaces = ""  # white space after text: dropped before a call
        self._started = False  # something other than white space came
        self._fresh = False  # the marker of calls came, and no call yet
        self._after_call = False
        self._braces = _Braces()
        self._scanned = 0  # characters of the buffer that went through `_braces`
        self._pieces: list[Piece] = []
        self.calls = 0

    def push(self, text: str) -> list[Piece]:
        """What `text` adds."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._take()

    def finish(self) -> list[Piece]:
        """The end of the text: what was held back."""
        cut = self._state == self._between and not self._fresh and self._style.closing.startswith(self._buffer)
        if not cut and self._state not in (self._in_arguments, self._in_tail):
            self._text(self._raw + self._buffer if self._fresh else self._buffer)
        self._raw = self._buffer = ""
        if self._spaces and not self.calls:
            self._pieces.append(Text(self._spaces))
        self._spaces = ""
        return self._take()

    def _take(self) -> list[Piece]:
        taken, self._pieces = self._pieces, []
        joined: list[Piece] = []
        for piece in taken:
            last = joined[-1] if joined else None
            if isinstance(piece, Text) and isinstance(last, Text):
                joined[-1] = Text(last.text + piece.text)
            else:
                joined.append(piece)
        return joined

    def _text(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        kept = text.rstrip()
        if kept:
            self._pieces.append(Text(self._spaces + kept))
            self._spaces = ""
            self._started = True
            self._after_call = False
        self._spaces += text[len(kept) :]

    def _in_text(self) -> bool:
        """Looks for the beginning of a call. Like all states: True if it moved, False if it waits for more."""
        buffer, opening = self._buffer, self._style.opening
        if not self._started and self._style.bare:
            head = buffer.lstrip()
            found = self._style.bare.match(head)
            if found is not None:
                at = len(buffer) - len(head)
                return self._open(at, at + found.end())
            if not head or self._style.bare.match(head + "{"):
                return False
        at = buffer.find(opening)
        if at >= 0:
            return self._open(at, at + len(opening))
        held = _overlap(buffer, opening)
        self._text(buffer[: len(buffer) - held])
        self._buffer = buffer[len(buffer) - held :]
        return False

    def _open(self, start: int, end: int) -> bool:
        self._text(self._buffer[:start])
        self._raw, self._buffer = self._buffer[start:end], self._buffer[end:]
        self._fresh = True
        self._state = self._between
        return True

    def _between(self) -> bool:
        """After the marker, and after each call."""
        buffer, closing = self._buffer, self._style.closing
        if buffer[0] in _BETWEEN or (buffer[0] == "[" and self._style.listed and self._fresh):
            self._raw, self._buffer = self._raw + buffer[0], buffer[1:]
            return True
        if buffer[0] == "{":
            self._braces = _Braces()
            self._scanned = 0
            self._state = self._in_object
            return True
        if closing and buffer.startswith(closing) and not self._fresh:
            self._raw, self._buffer = "", buffer[len(closing) :]
            self._state = self._in_text
            return True
        if closing and closing.startswith(buffer):
            return False
        return self._no_call()

    def _no_call(self, length: int = 0) -> bool:
        """What came since the marker, and `length` more characters, are text."""
        self._text(self._raw + self._buffer[:length])
        self._raw, self._buffer = "", self._buffer[length:]
        self._state = self._in_text
        return True

    def _in_object(self) -> bool:
        """An object whose arguments cannot be sent yet."""
        found = _HEAD.match(self._buffer)
        if found is not None:
            name = _read(found[1])
            if name not in self._names:
                return self._no_call(found.end())
            self._start(name)
            self._buffer = self._buffer[found.end() :]
            self._braces = _Braces()
            self._state = self._in_arguments
            return True
        end = self._braces.end(self._buffer, self._scanned)
        if end is None:
            self._scanned = len(self._buffer)
            return False
        call = _read(self._buffer[:end])
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return self._no_call(end)
        arguments = call.get("arguments", call.get("parameters", {}))
        self._start(name)
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        # An escape in JSON may stand for half of a surrogate pair, which no answer can hold.
        self._pieces.append(CallArguments(self.calls - 1, written.encode(errors="replace").decode()))
        self._buffer = self._buffer[end:]
        self._state = self._between
        return True

    def _start(self, name: str) -> None:
        self._pieces.append(CallStart(self.calls, name))
        self.calls += 1
        self._raw = self._spaces = ""
        self._fresh = False
        self._started = self._after_call = True

    def _in_arguments(self) -> bool:
        end = self._braces.end(self._buffer, 0)
        piece = self._buffer if end is None else self._buffer[:end]
        self._pieces.append(CallArguments(self.calls - 1, piece))
        self._buffer = self._buffer[len(piece) :]
        if end is not None:
            self._state = self._in_tail
        return True

    def _in_tail(self) -> bool:
        """The rest of the object after its arguments. One that does not close is taken as closed."""
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest[0] == ",":
            self._braces = _Braces(depth=1)
            self._state = self._in_other_keys
            return True
        self._buffer = rest.removeprefix("}")
        self._state = self._between
        return True

    def _in_other_keys(self) -> bool:
        end = self._braces.end(self._buffer, 0)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._state = self._between
        return True


class _Braces:
    """Finds where a JSON value in brackets ends; may be fed in pieces."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def end(self, text: str, start: int) -> int | None:
        """The position after the bracket that closes the first one; `text` before `start` was fed already."""
        for i in range(start, len(text)):
            char = text[i]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return None


def _read(text: str) -> Any:
    """The JSON value, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`, but is not all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
