"""Reads calls out of what a model writes, piece by piece, in any of the formats of text/calls/.

    parser = ToolParser(HERMES, {"get_weather": {...}})
    parser.push('Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"ci')
        -> [Text("Let me look."), CallStart(0, "get_weather"), CallArguments(0, '{"ci')]

How the text is cut into pieces does not change what comes out, joined. What looks like a call and is none (no JSON, no
name, a function that does not exist) stays text. White space around calls is dropped. Arguments are JSON if the model
wrote what its format asks for and was not cut short.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from .calls.base import CallFormat
from .calls.cursor import Cursor


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """`ident`: the id of the call, if the model wrote one."""

    index: int
    name: str
    ident: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    piece: str


Piece = Text | CallStart | CallArguments  # what a push gives, in order


class ToolParser:
    """The state of one choice.

    Args:
        style: how this model writes calls.
        functions: the names of those that exist, with the JSON schemas of their parameters where those are known.
    """

    def __init__(self, style: CallFormat, functions: Mapping[str, Any] | Collection[str]) -> None:
        self.cursor = Cursor()
        self.calls = 0
        self._style = style
        self._functions = functions if isinstance(functions, Mapping) else dict.fromkeys(functions)
        self._spaces = ""  # white space after text: dropped before a call
        self._after_call = False
        self._pieces: list[Piece] = []
        self._steps = self._read()
        self._running = True

    def push(self, text: str) -> list[Piece]:
        """What `text` adds."""
        self.cursor.feed(text)
        return self._advance()

    def finish(self) -> list[Piece]:
        """The end of the text: what was held back."""
        self.cursor.ended = True
        pieces = self._advance()
        if self._spaces and not self.calls:
            pieces = _joined([*pieces, Text(self._spaces)])
        self._spaces = ""
        return pieces

    def known(self, name: object) -> bool:
        return isinstance(name, str) and name in self._functions

    def parameters(self, name: str) -> Mapping[str, Any]:
        found = self._functions.get(name)
        return found if isinstance(found, Mapping) else {}

    def start(self, name: str, ident: str | None = None) -> None:
        self._pieces.append(CallStart(self.calls, name, ident))
        self.calls += 1
        self._spaces = ""
        self._after_call = True

    def arguments(self, piece: str) -> None:
        self._pieces.append(CallArguments(self.calls - 1, piece))

    def _advance(self) -> list[Piece]:
        if self._running:
            self._running = next(self._steps, self) is not self
        taken, self._pieces = self._pieces, []
        return _joined(taken)

    def _read(self) -> Generator[None, None, None]:
        cursor, style = self.cursor, self._style
        if style.bare is not None and (yield from self._begins_bare()):
            cursor.mark()
            yield from self._section("")
        while True:
            opening = yield from cursor.until(style.openings or ("\0",), self._text)
            if opening is None:
                return
            cursor.mark(opening)
            yield from self._section(opening)

    def _section(self, opening: str) -> Generator[None, None, None]:
        before = self.calls
        if not (yield from self._style.read(self, opening)) and not (
            self.cursor.ended and self.calls > before and not self.cursor.buffer
        ):
            self._text(self.cursor.since_mark())

    def _begins_bare(self) -> Generator[None, None, bool]:
        """Whether the answer begins as a call without an opening; takes the white space before one."""
        cursor, bare = self.cursor, self._style.bare
        assert bare is not None
        while True:
            head = cursor.buffer.lstrip()
            if bare.match(head):
                self._spaces += cursor.take(len(cursor.buffer) - len(head))
                return True
            if cursor.ended or (head and not any(bare.match(head + more) for more in "[{")):
                return False
            yield

    def _text(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        kept = text.rstrip()
        if kept:
            self._pieces.append(Text(self._spaces + kept))
            self._spaces = ""
            self._after_call = False
        self._spaces += text[len(kept) :]


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Without neighbours of one kind."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and last.index == piece.index:
            joined[-1] = CallArguments(last.index, last.piece + piece.piece)
        else:
            joined.append(piece)
    return joined
