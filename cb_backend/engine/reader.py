"""The reader's side of a request: deltas of tokens become deltas of text, and leaving becomes an abort.

Runs on the caller's thread or event loop; knows the engine thread only by the messages it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..client import OutputDelta
from ..request import FinishReason, Request, TokenDelta
from ..text.output import OutputBuilder
from .core import EngineCore
from .messages import AbortMessage


class Reader:
    """One request as its reader sees it: a builder per choice."""

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Any,
        choices: Sequence[Request],
        on_release: Callable[[str], None],
        on_leave: Callable[[], None],
        continues_prompt: bool = False,
    ) -> None:
        leader = choices[0]
        prompt_ids = tuple(leader.token_ids[: leader.prompt_len])
        self.request_id = leader.request_id
        self._core = core
        self._on_release = on_release
        self._on_leave = on_leave
        self._builders = [
            OutputBuilder(tokenizer, c.params, c.request_id, prompt_ids, c.index, continues_prompt) for c in choices
        ]
        self._unfinished = len(choices)
        self._closed = False

    @property
    def done(self) -> bool:
        return self._unfinished == 0

    def feed(self, delta: TokenDelta) -> OutputDelta | None:
        """What a client sees of this delta; None if it says nothing, or comes after the choice's end."""
        builder = self._builders[delta.index]
        if builder.finished:
            return None  # computed before the engine thread knew of the stop string
        output = builder.feed(delta)
        if builder.finished:
            self._unfinished -= 1
            if builder.stopped_by_text:
                self._core.send(AbortMessage(self.request_id, FinishReason.STOP, delta.index))
            if self._unfinished == 0:
                self.release()
        return output

    def close(self) -> None:
        """Ends what is unfinished in the engine."""
        if self._closed:
            return
        self._closed = True
        if self._unfinished:
            self.release()
            self._on_leave()
            self._core.send(AbortMessage(self.request_id, FinishReason.ABORT))

    def release(self) -> None:
        """Its id may be used again."""
        self._on_release(self.request_id)
