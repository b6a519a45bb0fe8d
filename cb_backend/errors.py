"""The two errors that reach people: `RequestError` tells a client, `ModelError` tells the operator.

Other libraries' errors are quoted by their first line (`first_line`): many append a whole state or a traceback.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from itertools import islice
from typing import Any


class RequestError(ValueError):
    """A request that cannot be served: what the client gets as a 4xx or 5xx.

    Args:
        reason: what is wrong with the field, what is allowed and what it was; without a field, the whole message.
        path: the way to the field at fault, as the client named it: `("messages", 0, "content")`. It begins the message
            and is `param`.
        param: the field at fault, of a message that does not begin with it.
        status: HTTP status: 400, 404, 413, 429, 502 or 503.
        code: short machine-readable word, e.g. `context_length_exceeded`; a label of the metric of refusals.
        retry_after: seconds after which the same request may succeed (429 and 503).

    Attributes:
        message: `'messages.0.content': must be text`.
        path: the way to the field at fault, or ().
        param: `messages.0.content`, or None.
        counted: it is in the metric of refusals already.
    """

    def __init__(
        self,
        reason: str,
        *,
        path: Iterable[str | int] = (),
        param: str | None = None,
        status: int = 400,
        code: str = "invalid_value",
        retry_after: float | None = None,
    ) -> None:
        self.reason = reason
        self.path = tuple(path) or (() if param is None else (param,))
        self.param = ".".join(map(str, self.path)) or None
        self._named = bool(path)
        self.message = f"'{self.param}': {reason}" if self._named else reason
        super().__init__(self.message)
        self.status = status
        self.code = code
        self.retry_after = retry_after
        self.counted = False

    def at(self, *path: str | int, code: str | None = None) -> RequestError:
        """The same refusal of a field that this client knows by another path."""
        other = RequestError(
            self.reason,
            path=path if self._named else (),
            param=".".join(map(str, path)) or None,
            status=self.status,
            code=code or self.code,
            retry_after=self.retry_after,
        )
        other.counted = self.counted
        return other


class ModelError(RuntimeError):
    """A model that cannot be served. The message is one sentence: what is wrong with what, and what to do."""


class _Short(reprlib.Repr):
    """The library's own sorts the keys of objects first, and writes bytes out whole."""

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if level <= 0:
            return "{...}"
        shown = (f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in islice(x, self.maxdict))
        return "{" + ", ".join([*shown, *["..."] * (len(x) > self.maxdict)]) + "}"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[: self.maxstring])


_SHORT = _Short()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 80, 80


def shown(value: Any) -> str:
    """A client's value in a message: its repr, at most 80 characters. Costs the same whatever the value's size."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def engine_failure(request_id: str) -> str:
    """What a client is told of a failure inside the engine. The exception itself is in the log, with the same id."""
    return f"the engine failed while serving this request (id {request_id})"


def first_line(error: BaseException | str, most: int = 500) -> str:
    """The first line of an error's message that is not blank, without its full stop and at most `most` characters long.

    An error without a message is called by its type.
    """
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()[:most].rstrip(".")
    return "no reason given" if isinstance(error, str) else type(error).__name__
