"""What one engine accepts: every check of a request that needs to know the model or the pool.

Errors name the field, the allowed range and the value. A request that passes can be served by an empty engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .params import RequestError, SamplingParams


def check_text(value: Any, name: str) -> str:
    """A string that a client gave for the field `name`: JSON and Python can spell half of a surrogate pair, which is no
    character, and which neither a tokenizer nor a span or a metric takes.

    Raises:
        RequestError: it is no string, or not one of whole characters.
    """
    if not isinstance(value, str):
        raise RequestError(f"'{name}': must be text (got {value!r:.80})", param=name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ord(value[error.start])
        raise RequestError(f"'{name}': holds U+{half:04X}, half of a surrogate pair", param=name) from None
    return value


def check_texts(fields: Any) -> None:
    """`check_text` for every string in a structure of mappings and sequences, keys included.

    Raises:
        RequestError: names the way to the first one at fault.
    """
    rest = [(fields, "")]
    while rest:  # a stack of its own: a client's nesting must not exhaust Python's
        value, where = rest.pop()
        if isinstance(value, str):
            check_text(value, where)
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                shown = key if isinstance(key, str) and key.isprintable() else repr(key)
                check_text(str(key), f"{where}.{shown}".lstrip("."))
                rest.append((inner, f"{where}.{shown}".lstrip(".")))
        elif isinstance(value, (list, tuple)):
            rest += [(inner, f"{where}.{i}") for i, inner in enumerate(value) if not isinstance(inner, (int, float))]


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_model_len`: prompt + output tokens of one sequence, never more than the pool holds."""

    max_model_len: int
    vocab_size: int
    pool_tokens: int
    max_num_seqs: int

    def check_prompt(self, token_ids: Sequence[Any], params: SamplingParams) -> int:
        """Returns the resolved max_tokens.

        Raises:
            RequestError: the prompt is empty, too long, or holds something that is not a token id.
        """
        if not token_ids:
            raise RequestError("'prompt': must not be empty", param="prompt")
        for i, token in enumerate(token_ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"'prompt[{i}]': a token id is an integer from 0 to {self.vocab_size - 1} (got {token!r})",
                    param="prompt",
                )
        length = len(token_ids)
        if length > self.pool_tokens:
            raise self._too_long(f"the prompt has {length} tokens and the KV pool holds {self.pool_tokens}", "prompt")
        if length > self.max_model_len:
            raise self._too_long(f"the prompt has {length} tokens, the model takes {self.max_model_len}", "prompt")
        room = self.max_model_len - length
        if params.max_tokens is None:
            if room == 0:
                raise self._too_long(
                    f"the prompt has {length} tokens and fills the context of {self.max_model_len}",
                    "prompt",
                )
            return room
        if params.max_tokens > room:
            raise self._too_long(
                f"the prompt's {length} tokens and max_tokens {params.max_tokens} make {length + params.max_tokens}, "
                f"more than the limit of {self.max_model_len}; ask for at most {room}",
                "max_tokens",
            )
        return params.max_tokens

    def check_params(self, params: SamplingParams) -> None:
        """Checks what depends on the model: token ids in the parameters, and the number of choices."""
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", tuple(params.logit_bias))):
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    raise RequestError(
                        f"'{name}': a token id is an integer from 0 to {self.vocab_size - 1} (got {token})", param=name
                    )
        if params.n > self.max_num_seqs:
            raise RequestError(
                f"'n': {params.n} choices, but at most {self.max_num_seqs} sequences run at once", param="n"
            )

    @staticmethod
    def _too_long(message: str, param: str) -> RequestError:
        return RequestError(f"'{param}': {message}", param=param, code="context_length_exceeded")
