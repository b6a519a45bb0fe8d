"""Token ids to text, as they come: never half a character, and joined exactly what decoding all ids at once gives.

Each push decodes a short window: the tokens whose text is not yet final, after a few whose text is (a decoder may look
at what stands before: many strip the space of the very first word). Knows ids and text; nothing of stops or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """`"".join(push(ids) for ...) + finish()` equals `tokenizer.decode(all ids, skip_special_tokens=...)`.

    Args:
        tokenizer: a transformers tokenizer.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._decode = decoder_of(tokenizer, skip_special_tokens)
        self._byte_ids = byte_fallback_ids(tokenizer)
        self._window: list[int] = []  # context, then tokens whose text is not all out
        self._context = 0  # tokens of the window that are context
        self._shown = 0  # characters of the window's text that are out

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became final with these tokens; may be empty."""
        if not token_ids:
            return ""
        self._window += token_ids
        if self._window[-1] in self._byte_ids:
            # A run of byte tokens is decoded as a whole, so its beginning depends on its end.
            return ""
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            # Perhaps the first bytes of a character; what stands before it is final.
            return self._show(text, len(text) - 1)
        fresh = self._show(text, len(text))
        self._forget(text)
        return fresh

    def finish(self) -> str:
        """What is left: the text of an incomplete character, as decoding everything would show it."""
        text = self._decode(self._window)
        return self._show(text, len(text))

    def _show(self, text: str, end: int) -> str:
        fresh = text[self._shown : end]
        self._shown = max(self._shown, end)
        return fresh

    def _forget(self, text: str) -> None:
        """Everything is out: the newest tokens become the context, if their text alone is not empty."""
        if self._context == 0 and len(self._window) == 1:
            self._context = 1
            return
        recent = self._window[self._context :]
        context = self._decode(recent)
        if context and text.endswith(context.lstrip()):
            self._window = recent
            self._shown = len(context)
        self._context = len(self._window)


@lru_cache(maxsize=16)
def byte_fallback_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the 256 byte tokens of a tokenizer that spells unknown characters by bytes, else nothing."""
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    if any(i is None or i == tokenizer.unk_token_id for i in ids):
        return frozenset()
    return frozenset(ids) if tokenizer.decode([ids[0xE6]]) == REPLACEMENT else frozenset()


def decoder_of(tokenizer: Any, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """Decodes a list of ids to text, without cleaning up spaces."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda ids: backend.decode(ids, skip_special_tokens=skip_special_tokens)
    return lambda ids: tokenizer.decode(
        ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
