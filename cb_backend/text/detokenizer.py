"""Token ids to text, as they come: never half a character, and joined exactly what decoding all ids at once gives.

Each push decodes a short window: a few tokens whose text is out (a decoder may look at what stands before: many strip
the space of the very first word), then those whose text is not yet final. Knows ids and text; nothing of stops or
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

REPLACEMENT = "\ufffd"

# Tokens that a cut of the window leaves. Where all their text is out, two: one alone may be a space that is stripped.
# Where a character is in the making, eight, since a token may be one byte: UTF-8 finds its step within three, and up to
# three more begin the next character.
_CONTEXT = 2
_CONTEXT_OF_HELD = 8


class IncrementalDetokenizer:
    """`"".join(push(ids) for ...) + finish()` equals `tokenizer.decode(all ids, skip_special_tokens=...)`.

    Args:
        tokenizer: a transformers tokenizer.
        skip_special_tokens: leave special tokens out of the text.
        after: ids that stand before the first one. With them the text continues theirs (`text_before`), as it must
            where the two are joined (an echoed prompt): a word keeps the space that tokenizers in the manner of Llama 2
            strip from the first word of a text.
        shown: special tokens that are not left out.
    """

    def __init__(
        self,
        tokenizer: Any,
        skip_special_tokens: bool = True,
        after: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        # Hidden tokens never reach the window.
        self._decode = decoder_of(tokenizer, skip_special_tokens and not shown)
        self._silent = silence_of(tokenizer, skip_special_tokens, shown)
        self._byte_ids = byte_fallback_ids(tokenizer)
        # Context, then the tokens whose text is not all out; how many characters of their text are out; at how many
        # tokens a cut is worth it.
        self._window, self._shown = self._context_of(after)
        self._long = 2 * _CONTEXT

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became final with these tokens; may be empty."""
        heard = [i for i in token_ids if not self._silent(i)]
        if not heard:
            return ""
        self._window += heard
        if heard[-1] in self._byte_ids:
            # A run of byte tokens is decoded as a whole, so its beginning depends on its end.
            return ""
        text = self._decode(self._window)
        # A replacement at the end may be the first bytes of a character; what stands before it is final.
        fresh = self._show(text, len(text) - text.endswith(REPLACEMENT))
        if len(self._window) > self._long:
            self._cut(text)
        return fresh

    def finish(self) -> str:
        """What is left: the text of an incomplete character, as decoding everything would show it."""
        text = self._decode(self._window)
        return self._show(text, len(text))

    def _context_of(self, after: Sequence[int]) -> tuple[list[int], int]:
        """The last few of `after`, and how much of their text is out: as many as the end of their text depends on."""
        count = _CONTEXT_OF_HELD
        while True:
            window = [i for i in after[-count:] if not self._silent(i)]
            shown = len(self._decode(window).rstrip(REPLACEMENT))
            if count >= len(after) or (shown and after[-count] not in self._byte_ids):
                return window, shown
            count *= 2

    def _show(self, text: str, end: int) -> str:
        fresh = text[self._shown : end]
        self._shown = max(self._shown, end)
        return fresh

    def _cut(self, text: str) -> None:
        """Forgets all but the newest tokens, if the text of these alone ends as the window's does."""
        held = len(text) - self._shown
        recent = self._window[-_CONTEXT_OF_HELD:] if held else self._window[-_CONTEXT:]
        context = self._decode(recent)
        if len(context) > held and context.endswith(text[self._shown :]):
            self._window = recent
            self._shown = len(context) - held
        # Twice what is left: trying at each token of a window that stays long would cost the square of its length.
        self._long = 2 * max(_CONTEXT, len(self._window))


def text_before(text: str) -> str:
    """The part of a prompt's text that no continuation changes; `IncrementalDetokenizer(after=...)` shows the rest."""
    return text.rstrip(REPLACEMENT)


def silence_of(tokenizer: Any, skip_special_tokens: bool, shown: frozenset[int] = frozenset()) -> Callable[[int], bool]:
    """Tells ids that decoding leaves out before it joins tokens: hidden special ones and holes in the vocabulary.

    Kept out of the window because they would part what decoding joins: two halves of a character, or a word and the
    space before it.
    """
    hidden = special_ids(tokenizer) - shown if skip_special_tokens else frozenset()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return hidden.__contains__
    token_of = backend.id_to_token
    return lambda token_id: token_id in hidden or token_of(token_id) is None


@lru_cache(maxsize=16)
def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that `skip_special_tokens` hides."""
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {token_id for token_id, token in added.items() if token.special}


@lru_cache(maxsize=16)
def special_texts(tokenizer: Any) -> dict[str, int]:
    """The special tokens by their text."""
    ids = sorted(special_ids(tokenizer))
    return {str(text): i for i, text in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)}


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
