"""Banned words as token sequences, kept for the requests that ban the same ones again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

MAX_CHARACTERS = 1_000_000  # of all lists that are kept
_PER_WORD = 16  # what a word costs beside its characters, in characters

Sequences = tuple[tuple[int, ...], ...]


class BadWords:
    """The lists used last, as many as fit into `max_characters`. Thread-safe.

    Args:
        tokenizer: None bans nothing.
    """

    def __init__(self, tokenizer: Any, max_characters: int = MAX_CHARACTERS) -> None:
        self._tokenizer = tokenizer
        self._max_characters = max_characters
        self._found: OrderedDict[tuple[str, ...], Sequences] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self.num_characters = 0

    def __len__(self) -> int:
        return len(self._found)

    def ids(self, words: tuple[str, ...]) -> Sequences:
        """Token sequences of `words`, at a text's beginning and after a space."""
        if not words or self._tokenizer is None:
            return ()
        with self._lock:
            found = self._found.get(words)
            if found is not None:
                self._found.move_to_end(words)
                return found
        spellings = [spelling for word in words for spelling in (word, " " + word.lstrip())]
        ids = (tuple(self._tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings)
        found = tuple(dict.fromkeys(i for i in ids if i))
        self._keep(words, found)
        return found

    def _keep(self, words: tuple[str, ...], found: Sequences) -> None:
        size = _size(words)
        if size > self._max_characters:
            return
        with self._lock:
            if words in self._found:
                return
            self._found[words] = found
            self.num_characters += size
            while self.num_characters > self._max_characters:
                self.num_characters -= _size(self._found.popitem(last=False)[0])


def _size(words: tuple[str, ...]) -> int:
    return sum(len(word) + _PER_WORD for word in words)
