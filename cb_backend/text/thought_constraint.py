"""Structured output after a thought, and a thought that ends in time: a constraint around a request's own.

While the model thinks, everything is allowed. Where its tokens for thinking are used up, nothing is but the tokens that
end the thought. Then the request's own constraint begins, if it has one. Where the prompt has not opened a thought, the
model may begin one or answer at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..request import Constraint
from .thoughts import ThoughtFormat

Words = npt.NDArray[np.int32]  # a bit for each token, lowest first


class ThoughtConstraint:
    """Args:
    opened: the prompt began the thought.
    budget: tokens of the thought before its end is forced; None: any number.
    then: what the answer must fit; None: nothing.
    calls: the answer is tool calls.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        style: ThoughtFormat,
        opened: bool,
        budget: int | None,
        then: Constraint | None,
        calls: bool,
    ) -> None:
        def ids(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._style = style
        self._budget = budget
        self._begin = [] if opened else ids(style.begins[0])
        self._end = ids(style.end)
        header = "" if calls else style.answer
        self._after = _Answer(ids(style.again + header), then, vocab_size)
        self._direct: _Answer | None = None if opened else _Answer(ids(header), then, vocab_size).fork()
        self._matched = 0  # tokens of `_begin` that came
        self._thought: list[int] | None = [] if opened else None
        self._forced = 0  # tokens of `_end` that were forced
        self._done = False  # the thought is over, or there is none

    def allowed(self) -> Words | None:
        if self._thought is not None:
            if self._budget is None or len(self._thought) < self._budget:
                return None
            return _only([self._end[min(self._forced, len(self._end) - 1)]], self._vocab_size)
        if self._done:
            return self._after.allowed()
        direct = None if self._direct is None else self._direct.allowed()
        if self._direct is not None and direct is None:
            return None
        begin = _only(self._begin[self._matched : self._matched + 1], self._vocab_size)
        return begin if direct is None else direct[: len(begin)] | begin

    def accept(self, token_id: int) -> None:
        if self._thought is not None:
            self._think(token_id)
        elif self._done:
            self._after.accept(token_id)
        else:
            self._choose(token_id)

    def _choose(self, token_id: int) -> None:
        """The beginning of a thought, of an answer, or of both."""
        if self._direct is not None:
            mask = self._direct.allowed()
            if mask is None or _has(mask, token_id):
                self._direct.accept(token_id)
            else:
                self._direct = None
        if self._begin[self._matched] == token_id:
            self._matched += 1
            if self._matched == len(self._begin):
                self._thought = []
        elif self._direct is not None:
            self._after, self._done = self._direct, True

    def _think(self, token_id: int) -> None:
        assert self._thought is not None
        over = self._budget is not None and len(self._thought) >= self._budget
        self._forced += over
        self._thought.append(token_id)
        recent = self._thought[-2 * len(self._end) - 8 :]
        if self._style.end in _text(self._tokenizer, recent) or (over and self._forced == len(self._end)):
            self._thought, self._done = None, True

    @property
    def finished(self) -> bool:
        return self._done and self._after.finished

    @property
    def error(self) -> str | None:
        return self._after.error if self._done else None

    def fork(self) -> ThoughtConstraint:
        other = object.__new__(ThoughtConstraint)
        other.__dict__.update(self.__dict__)
        other._after = self._after.fork()
        other._direct = None if self._direct is None else self._direct.fork()
        other._thought = None if self._thought is None else list(self._thought)
        return other


class _Answer:
    """Tokens that must come, and then what another constraint says."""

    def __init__(self, ids: Sequence[int], then: Constraint | None, vocab_size: int) -> None:
        # Nothing is forced on an answer that is free: the model may as well write a call.
        self._ids = list(ids) if then is not None else []
        self._then = then
        self._vocab_size = vocab_size
        self._count = 0

    def allowed(self) -> Words | None:
        if self._count < len(self._ids):
            return _only([self._ids[self._count]], self._vocab_size)
        mask: Words | None = None if self._then is None else self._then.allowed()
        return mask

    def accept(self, token_id: int) -> None:
        if self._count < len(self._ids):
            self._count += 1
        elif self._then is not None:
            self._then.accept(token_id)

    @property
    def finished(self) -> bool:
        return self._count >= len(self._ids) and self._then is not None and self._then.finished

    @property
    def error(self) -> str | None:
        return None if self._then is None else self._then.error

    def fork(self) -> _Answer:
        other = _Answer(self._ids, None if self._then is None else self._then.fork(), self._vocab_size)
        other._ids, other._count = self._ids, self._count
        return other


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _only(ids: Sequence[int], vocab_size: int) -> Words:
    """The mask that allows these tokens alone: int32 [ceil(vocab / 32)]."""
    words = [0] * ((vocab_size + 31) // 32)
    for i in ids:
        words[i // 32] |= 1 << (i % 32)
    return np.array(words, dtype=np.uint32).view(np.int32)


def _has(mask: Words, token_id: int) -> bool:
    return bool(int(mask[token_id // 32]) >> (token_id % 32) & 1)
