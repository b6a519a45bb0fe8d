"""What one engine accepts: every check of a request that needs to know the model or the pool.

Errors name the field, the allowed range and the value. A request that passes can be served by an empty engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..client import GenerationOptions
from ..errors import RequestError
from ..params import SamplingParams, check_text


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
        raise RequestError(f"must be an integer, lower is served first (got {priority!r})", path=("priority",))
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf
    ):
        raise RequestError(f"must be a positive number of seconds (got {timeout!r})", path=("timeout",))
    for name, text in (("request_id", request_id), ("salt", options.salt)):
        if text is not None:
            check_text(text, name)
