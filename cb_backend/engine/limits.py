"""What one engine accepts: every check of a request that needs to know the model or the pool.

Errors name the field, the allowed range and the value. A request that passes can be served by an empty engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..client import GenerationOptions
from ..errors import RequestError, shown
from ..params import SamplingParams, check_text

_CHARACTERS_PER_TOKEN = 64
_LEAST_CHARACTERS = 200_000


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
            raise RequestError("must not be empty", path=("prompt",))
        length = len(token_ids)  # before the ids are looked at: there may be millions
        if length > self.pool_tokens:
            raise self._too_long(f"the prompt has {length} tokens and the KV pool holds {self.pool_tokens}", "prompt")
        if length > self.max_model_len:
            raise self._too_long(f"the prompt has {length} tokens, the model takes {self.max_model_len}", "prompt")
        self._check_ids(token_ids)
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

    @property
    def max_characters(self) -> int:
        """Characters of a text that are read at all: far more than the context holds, far fewer than a body may have.

        A token of usual text has 3 to 5 characters.
        """
        return max(_LEAST_CHARACTERS, _CHARACTERS_PER_TOKEN * self.max_model_len)

    def check_characters(self, text: str) -> None:
        """
        Raises:
            RequestError: the text is too long for the context, whatever its tokens are.
        """
        if len(text) > self.max_characters:
            raise self._too_long(
                f"the text has {len(text)} characters, more than the {self.max_characters} that are read for a context "
                f"of {self.max_model_len} tokens",
                "prompt",
            )

    def _check_ids(self, token_ids: Sequence[Any]) -> None:
        # A bool is an int, but no token id. The loop runs only where there is a fault.
        if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < self.vocab_size:
            return
        for i, token in enumerate(token_ids):
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"'prompt[{i}]': a token id is an integer from 0 to {self.vocab_size - 1} (got {shown(token)})",
                    param="prompt",
                )

    def check_params(self, params: SamplingParams) -> None:
        """Checks what depends on the model: token ids in the parameters, and the number of choices."""
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", tuple(params.logit_bias))):
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    raise RequestError(
                        f"a token id is an integer from 0 to {self.vocab_size - 1} (got {token})", path=(name,)
                    )
        if params.n > self.max_num_seqs:
            raise RequestError(
                f"{params.n} choices, but at most {self.max_num_seqs} sequences run at once", path=("n",)
            )

    @staticmethod
    def _too_long(message: str, param: str) -> RequestError:
        return RequestError(message, path=(param,), code="context_length_exceeded")


def check_options(options: GenerationOptions, request_id: str | None) -> None:
    """Checks what may come from code instead of a parsed request.

    Raises:
        RequestError: `priority` is no integer, `timeout` no positive number of seconds, or an id no text.
    """
    priority, timeout = options.priority, options.timeout
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"must be an integer, lower is served first (got {shown(priority)})", path=("priority",))
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf
    ):
        raise RequestError(f"must be a positive number of seconds (got {shown(timeout)})", path=("timeout",))
    for name, text in (("request_id", request_id), ("salt", options.salt)):
        if text is not None:
            check_text(text, name)
