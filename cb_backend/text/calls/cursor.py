"""A text that comes in pieces, read as if it were there whole.

A reader is a generator that yields where it needs more text, and decides by the text alone, never by where it was cut:
so how a text is cut into pieces cannot change what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

Steps = Generator[None, None, Any]
Emit = Callable[[str], None]


class Cursor:
    """Attributes:
    buffer: what came and is not read.
    ended: nothing more will come.
    """

    def __init__(self) -> None:
        self.buffer = ""
        self.ended = False
        self._raw: list[str] = []

    def feed(self, text: str) -> None:
        self.buffer += text

    def mark(self, before: str = "") -> None:
        """What is taken from here on, and `before`, is what `since_mark` gives."""
        self._raw = [before]

    def since_mark(self) -> str:
        return "".join(self._raw)

    def take(self, count: int) -> str:
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        self._raw.append(taken)
        return taken

    def more(self) -> Generator[None, None, bool]:
        """Waits for a character; False at the end of the text."""
        while not self.buffer and not self.ended:
            yield
        return bool(self.buffer)

    def space(self, also: str = "") -> Generator[None, None, str]:
        """Takes white space and the characters of `also`; gives the next character, "" at the end of the text."""
        while True:
            self.take(len(self.buffer) - len(self.buffer.lstrip(" \t\r\n" + also)))
            if self.buffer or self.ended:
                return self.buffer[:1]
            yield

    def at(self, *markers: str, cut: bool = True) -> Generator[None, None, str | None]:
        """Takes the marker that stands here, or with `cut` a part of it that ends the text; None: none does.

        No marker may begin another.
        """
        while True:
            for marker in markers:
                if self.buffer.startswith(marker):
                    self.take(len(marker))
                    return marker
            begun = [marker for marker in markers if self.buffer and marker.startswith(self.buffer)]
            if self.ended and begun and cut:
                self.take(len(self.buffer))
                return begun[0]
            if self.ended or (self.buffer and not begun):
                return None
            yield

    def until(self, markers: Sequence[str], emit: Emit) -> Generator[None, None, str | None]:
        """Hands all text before the first of the markers to `emit` and takes the marker; None: the text ended."""
        while True:
            found = [(at, marker) for marker in markers if (at := self.buffer.find(marker)) >= 0]
            # The beginning of a marker at the end of what came goes before a whole one that begins after it.
            held = 0 if self.ended else max(_overlap(self.buffer, marker) for marker in markers)
            sure = len(self.buffer) - held
            if found and min(found)[0] <= sure:
                at, marker = min(found)
                emit(self.take(at))
                self.take(len(marker))
                return marker
            emit(self.take(sure))
            if self.ended:
                return None
            yield

    def text_until(self, *markers: str) -> Generator[None, None, tuple[str, str | None]]:
        """The same, collecting the text."""
        pieces: list[str] = []
        marker = yield from self.until(markers, pieces.append)
        return "".join(pieces), marker

    def json_value(self, emit: Emit) -> Generator[None, None, bool]:
        """Hands the JSON value that stands here to `emit` as it comes; False: the text ended within it."""
        if not (yield from self.more()):
            return False
        if self.buffer[0] not in '{["':
            return (yield from self._scalar(emit))
        depth, in_string, escaped = 0, False, False
        while True:
            for i, char in enumerate(self.buffer):
                if escaped:
                    escaped = False
                    continue
                if in_string:
                    escaped = char == "\\"
                    in_string = char != '"'
                elif char == '"':
                    in_string = True
                else:
                    depth += (char in "{[") - (char in "}]")
                if depth <= 0 and not in_string and not escaped:
                    emit(self.take(i + 1))
                    return True
            emit(self.take(len(self.buffer)))
            if self.ended:
                return False
            yield

    def _scalar(self, emit: Emit) -> Generator[None, None, bool]:
        while True:
            end = next((i for i, char in enumerate(self.buffer) if char in ',}]"{[: \t\r\n'), None)
            emit(self.take(len(self.buffer) if end is None else end))
            if end is not None:
                return True
            if self.ended:
                return False
            yield

    def json_text(self) -> Generator[None, None, str | None]:
        """The JSON value that stands here, as it is written; None: the text ended within it."""
        pieces: list[str] = []
        whole = yield from self.json_value(pieces.append)
        return "".join(pieces) if whole else None


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`, but is not all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
