"""Thoughts: what a reasoning model writes before its answer, and how it is told from the answer.

A thought's format is chosen by what the chat template shows. Some templates open the thought in the prompt already; the
model's text then begins within it. In a thought nothing is looked for but its end: no call, no stop string.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from .calls.cursor import Cursor


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """Attributes:
    begins: what begins a thought; a request's first one stands at the beginning of its text.
    end: what ends it.
    headers: what is no part of the answer either, wherever it stands.
    anywhere: a thought may begin later than at the beginning, too.
    answer: what the model writes before an answer that is no call, and `again`: before whatever follows a thought.
    """

    name: str
    begins: tuple[str, ...]
    end: str
    headers: tuple[str, ...] = ()
    anywhere: bool = False
    answer: str = ""
    again: str = ""

    @property
    def specials(self) -> tuple[str, ...]:
        """Markers that may be special tokens, which have to be shown to be read."""
        if self.name == "harmony":
            return ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|end|>")
        return (*self.begins, self.end)


_HARMONY_HEADERS = ("<|channel|>final<|message|>", "<|channel|>commentary<|message|>")

THOUGHTS = {
    one.name: one
    for one in (
        ThoughtFormat(
            "harmony",
            ("<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>analysis<|message|>"),
            "<|end|>",
            headers=(*_HARMONY_HEADERS, *(f"<|start|>assistant{header}" for header in _HARMONY_HEADERS), "<|end|>"),
            anywhere=True,
            answer="<|channel|>final<|message|>",
            again="<|start|>assistant",
        ),
        ThoughtFormat("mistral", ("[THINK]",), "[/THINK]"),
        ThoughtFormat("seed", ("<seed:think>",), "</seed:think>"),
        ThoughtFormat("kimi", ("◁think▷",), "◁/think▷"),
        ThoughtFormat("granite", ("Here is my thought process:",), "Here is my response:"),
        ThoughtFormat("reasoning", ("<reasoning>",), "</reasoning>"),
        ThoughtFormat("think", ("<think>",), "</think>"),
    )
}


def shown_thoughts(template: str) -> ThoughtFormat | None:
    """The format of the thoughts of a model with this chat template; None: it shows none."""
    if "<|channel|>" in template and "analysis" in template:
        return THOUGHTS["harmony"]
    return next((one for one in THOUGHTS.values() if one.begins[0] in template or one.end in template), None)


def opened_by(prompt: str, style: ThoughtFormat) -> bool:
    """Whether the prompt, as the template wrote it, ends within a thought."""
    return prompt.rstrip().endswith(style.begins)


class ThoughtSplitter:
    """Parts a text into thought and answer, piece by piece. White space at both ends of a thought is dropped.

    Args:
        opened: the prompt began the thought.

    Attributes:
        thinking: the text so far ends within a thought.
    """

    def __init__(self, style: ThoughtFormat, opened: bool = False) -> None:
        self.thinking = opened
        self._style = style
        self._cursor = Cursor()
        self._pieces: list[tuple[bool, str]] = []
        self._held = ""  # white space that may end the thought
        self._steps = self._read()
        self._running = True

    def push(self, text: str) -> list[tuple[bool, str]]:
        """What became certain: (it is thought, text) in order."""
        self._cursor.feed(text)
        if self._running:
            self._running = next(self._steps, self) is not self
        taken, self._pieces = self._pieces, []
        return taken

    def finish(self) -> list[tuple[bool, str]]:
        self._cursor.ended = True
        return self.push("")

    def _read(self) -> Generator[None, None, None]:
        cursor, style = self._cursor, self._style
        if self.thinking:
            yield from self._thought()
        elif not style.anywhere:
            cursor.mark()
            yield from cursor.space()
            if (yield from cursor.at(*style.begins, cut=False)) is None:
                self._answer(cursor.since_mark())
            else:
                yield from self._thought()
        markers = (*style.headers, *(style.begins if style.anywhere else ()))
        while True:
            if not markers:
                self._answer(cursor.take(len(cursor.buffer)))
                if cursor.ended:
                    return
                yield
                continue
            found = yield from cursor.until(markers, self._answer)
            if found is None:
                return
            if found in style.begins:
                yield from self._thought()

    def _thought(self) -> Generator[None, None, None]:
        self.thinking = True
        self._held = ""
        yield from self._cursor.space()
        found = yield from self._cursor.until((self._style.end,), self._think)
        if found is None:
            return  # the text ended within it
        self.thinking = False
        yield from self._cursor.space()

    def _think(self, text: str) -> None:
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if kept:
            self._pieces.append((True, kept))

    def _answer(self, text: str) -> None:
        if text:
            self._pieces.append((False, text))
