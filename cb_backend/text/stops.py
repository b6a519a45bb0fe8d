"""Stop strings over a stream of text: what may be shown now, and whether it ends.

The match that completes first wins; of those that complete at the same character, the one that began first. Only a
suffix that really is the beginning of some stop string is held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Args:
    stops: non-empty strings.
    include: whether the shown text keeps the stop string that ended it.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self.held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that matched or None). After a match nothing may be pushed."""
        if not self._stops:
            return text, None
        text = self.held + text
        best: tuple[int, int, str] | None = None  # (end, start, stop)
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            end, start, stop = best
            self.held = ""
            return text[: end if self._include else start], stop
        keep = self._overlap(text)
        shown = text[: len(text) - keep]
        self.held = text[len(shown) :]
        return shown, None

    def finish(self) -> str:
        """The text that was held back in vain."""
        held, self.held = self.held, ""
        return held

    def _overlap(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a proper beginning of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[len(text) - size :]
            if any(len(stop) > size and stop.startswith(suffix) for stop in self._stops):
                return size
        return 0
