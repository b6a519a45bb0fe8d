"""Log-probabilities in OpenAI's two shapes, and how one token is written in them.

A token is written by its own bytes, whatever stands before it: as text if they are whole characters, else as
`bytes:\\xe2\\x80`, so that alternatives that share a beginning stay apart. Values are natural logarithms of the model's
own probabilities; what JSON cannot say (minus infinity) is -9999.0, as OpenAI does.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from ..request import Logprob
from ..text.detokenizer import byte_fallback_ids, decoder_of, special_ids

_LOWEST = -9999.0


class TokenTexts:
    """Bytes and spelling of single tokens of one tokenizer.

    Args:
        tokenizer: a transformers tokenizer. A slow one, without a known decoder, is asked for each token's text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
        self._byte_level = "ByteLevel" in decoder
        self._spaced = "▁" in decoder
        self._added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        self._vocab_size = len(tokenizer)
        self._known: dict[int, bytes] = {}  # at most one entry per id of the vocabulary
        self.special = special_ids(tokenizer)
        self.byte_ids = byte_fallback_ids(tokenizer)

    def bytes_of(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._bytes_of(token_id)
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id) if token_id < self._vocab_size else None
        if piece is None:
            return b""
        if self._byte_level:
            return b"".join(_byte_alphabet().get(char) or char.encode() for char in piece)
        if self._spaced:
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
            return piece.replace("▁", " ").encode()
        text: str = self._tokenizer.decode([token_id])
        return text.encode()

    def text_of(self, token_id: int) -> str:
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def lost_at_start(self, token_id: int) -> int:
        """Characters of the token that a text does not show if it begins with it: many tokenizers strip a space."""
        raw = self.bytes_of(token_id)
        if not raw.startswith(b" ") or self._byte_level:
            return 0
        return max(0, len(raw.decode(errors="replace")) - len(decoder_of(self._tokenizer, False)([token_id])))


def chat_logprobs(tokens: TokenTexts, logprobs: Sequence[Logprob]) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""

    def entry(token_id: int, value: float) -> dict[str, Any]:
        return {
            "token": tokens.text_of(token_id),
            "logprob": max(value, _LOWEST),
            "bytes": list(tokens.bytes_of(token_id)),
        }

    return {
        "content": [
            {**entry(one.token_id, one.logprob), "top_logprobs": [entry(i, value) for i, value in one.top]}
            for one in logprobs
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """`choices[].logprobs` of completions, piece by piece: offsets go on where the last piece ended.

    An offset is where the token begins in the text that the client sees, an echoed prompt included. A token that is not
    shown (a hidden special one) takes no room in it.

    Args:
        skip_special_tokens: whether the output hides them.
    """

    def __init__(self, tokens: TokenTexts, skip_special_tokens: bool) -> None:
        self._tokens = tokens
        self._position = _Position(tokens)
        self._hidden = tokens.special if skip_special_tokens else frozenset()

    def prompt(self, text: str, token_ids: Sequence[int], logprobs: Sequence[Logprob | None]) -> dict[str, Any]:
        """The entries of a prompt that is echoed as `text`, which may lack special tokens that were added to it."""

        def hides(token_id: int) -> bool:
            spelled = self._tokens.text_of(token_id)
            return token_id in self._tokens.special and not text.startswith(spelled, self._position.now)

        plain = b"".join(self._tokens.bytes_of(i) for i in token_ids if i not in self._tokens.special)
        if plain.decode(errors="replace").startswith(text):
            self._position.begun = True  # a space at the beginning that decoding would lose is the client's own
        return self._entries(token_ids, logprobs, hides)

    def piece(self, token_ids: Sequence[int], logprobs: Sequence[Logprob | None]) -> dict[str, Any]:
        """One entry per token of the output."""
        return self._entries(token_ids, logprobs, self._hidden.__contains__)

    def _entries(
        self, token_ids: Sequence[int], logprobs: Sequence[Logprob | None], hides: Callable[[int], bool]
    ) -> dict[str, Any]:
        """None in `logprobs` (the first token of a prompt) is an entry without a value."""
        shape: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, one in zip(token_ids, logprobs, strict=True):
            shape["tokens"].append(self._tokens.text_of(token_id))
            shape["text_offset"].append(self._position.now if hides(token_id) else self._position.add(token_id))
            if one is None:
                shape["token_logprobs"].append(None)
                shape["top_logprobs"].append(None)
                continue
            shape["token_logprobs"].append(max(one.logprob, _LOWEST))
            values = {self._tokens.text_of(i): max(value, _LOWEST) for i, value in one.top}
            values.setdefault(self._tokens.text_of(token_id), max(one.logprob, _LOWEST))
            shape["top_logprobs"].append(values)
        return shape


class _Position:
    """How far a text has come, in characters, while its tokens are counted."""

    def __init__(self, tokens: TokenTexts) -> None:
        self._tokens = tokens
        self._whole = 0  # characters that are complete
        self.begun = False  # the first token that has a text was added
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = b""  # the newest byte tokens: if they spell no text together, each of them is a U+FFFD

    @property
    def now(self) -> int:
        return self._whole + len(self._run.decode(errors="ignore"))

    def add(self, token_id: int) -> int:
        """Where the token begins: the characters that are complete before it."""
        raw = self._tokens.bytes_of(token_id)
        if token_id in self._tokens.byte_ids:
            begin = self.now
            self._run += raw
            return begin
        if self._run:
            self._whole += _characters(self._run)
            self._run = b""
        if raw and raw[0] & 0xC0 != 0x80:  # goes on with no character: one that is open ends as U+FFFD
            self._whole += len(self._decoder.decode(b"", final=True))
        begin = self._whole
        self._whole += len(self._decoder.decode(raw))
        if raw and not self.begun:
            self.begun = True
            self._whole -= self._tokens.lost_at_start(token_id)
        return begin


def _characters(run: bytes) -> int:
    try:
        return len(run.decode())
    except UnicodeDecodeError:
        return len(run)


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the rest follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): bytes([byte]) for byte in printable},
        **{chr(256 + i): bytes([byte]) for i, byte in enumerate(others)},
    }
