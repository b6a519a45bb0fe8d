"""The two errors that reach people: `RequestError` tells a client, `ModelError` tells the operator. Imports nothing."""

from __future__ import annotations


class RequestError(ValueError):
    """A request that cannot be served: what the client gets as a 4xx.

    Attributes:
        param: the field at fault, as the client named it, or None.
        status: HTTP status: 400, 404, 413, 429 or 503.
        code: short machine-readable word, e.g. `context_length_exceeded`.
        retry_after: seconds after which the same request may succeed (429 and 503).
        counted: it is in the metric of refusals already.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str = "invalid_value",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code
        self.retry_after = retry_after
        self.counted = False

    def about(self, message: str, param: str | None) -> RequestError:
        """The same refusal in the words of another interface."""
        other = RequestError(message, param=param, status=self.status, code=self.code, retry_after=self.retry_after)
        other.counted = self.counted
        return other


class ModelError(RuntimeError):
    """A model that cannot be served. The message is one sentence: what is wrong with what, and what to do."""
