"""The two errors that reach people: `RequestError` tells a client, `ModelError` tells the operator. Imports nothing.

Other libraries' errors are quoted by their first line (`first_line`): many append a whole state or a traceback.
"""

from __future__ import annotations


class RequestError(ValueError):
    """A request that cannot be served: what the client gets as a 4xx.

    Attributes:
        message: one sentence: what is wrong with which field, its range, and the value it had.
        param: the field at fault, as the client named it (`response_format.json_schema`), or None.
        status: HTTP status: 400, 404, 413, 429 or 503.
        code: short machine-readable word, e.g. `context_length_exceeded`; a label of the metric of refusals.
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
        """The same refusal (status, code, retry_after) with another interface's message and field."""
        other = RequestError(message, param=param, status=self.status, code=self.code, retry_after=self.retry_after)
        other.counted = self.counted
        return other


class ModelError(RuntimeError):
    """A model that cannot be served. The message is one sentence: what is wrong with what, and what to do."""


def first_line(error: BaseException | str, most: int = 500) -> str:
    """The first line of an error's message that is not blank, without its full stop and at most `most` characters long.

    An error without a message is called by its type.
    """
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()[:most].rstrip(".")
    return "no reason given" if isinstance(error, str) else type(error).__name__
