"""Stop strings over a stream of text: what may be shown now, and whether it ends.

The match that completes first wins; of those that complete at the same character, the one that began first. Only a
suffix that really is the beginning of some stop string is held back. Time is linear in the text, whatever the stop
strings: an automaton (Aho and Corasick, 1975) reads each character once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache


class StopMatcher:
    """Args:
    stops: non-empty strings.
    include: whether the shown text keeps the stop string that ended it.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._include = include
        self._root = self._node = _automaton(tuple(stops)) if stops else None
        self.held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that matched or None). After a match nothing may be pushed.

        Args:
            armed: False reads on over stop strings that `text` completes; one that it only begins may match later.
        """
        if self._root is None or self._node is None:
            return text, None
        node = self._node
        for position, character in enumerate(text, 1):
            while character not in node.next and node.fallback is not None:
                node = node.fallback
            node = node.next.get(character, self._root)
            if node.stop is not None and armed:
                whole = self.held + text[:position]
                self.held = ""
                return whole if self._include else whole[: len(whole) - len(node.stop)], node.stop
        while not node.next and node.fallback is not None:
            node = node.fallback  # a whole stop string that was read over begins nothing
        self._node = node
        text = self.held + text
        shown = text[: len(text) - node.depth]
        self.held = text[len(shown) :]
        return shown, None

    def finish(self) -> str:
        """The text that was held back in vain."""
        held, self.held = self.held, ""
        return held


@dataclass(slots=True, eq=False)
class _Node:
    """Where the text stands: its longest suffix that begins a stop string has `depth` characters."""

    depth: int
    next: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None  # the same for the next shorter suffix; None at the root
    stop: str | None = None  # the longest stop string that ends here


@lru_cache(maxsize=16)  # the choices of a request share it
def _automaton(stops: tuple[str, ...]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for character in stop:
            node = node.next.setdefault(character, _Node(node.depth + 1))
        node.stop = stop
    queue = deque([root])
    while queue:  # by depth: a fallback is shorter, so it is ready before it is needed
        node = queue.popleft()
        for character, child in node.next.items():
            shorter = node.fallback
            while shorter is not None and character not in shorter.next:
                shorter = shorter.fallback
            child.fallback = root if shorter is None else shorter.next[character]
            child.stop = child.stop or child.fallback.stop
            queue.append(child)
    return root
