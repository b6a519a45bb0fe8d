"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`, with the right status and headers."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from ..client import OutputDelta
from ..errors import RequestError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "client_closed_request",
    503: "service_unavailable",
    504: "timeout_error",
}


class ClientLeft(Exception):
    """The client closed its connection: no answer can be sent."""


class GenerationFailed(Exception):
    """The engine ended the request without a result.

    Attributes:
        status: HTTP status, if nothing was sent yet.
        code: `engine_error`, `aborted` or `timeout`.
    """

    def __init__(self, message: str, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def check_outcome(output: OutputDelta) -> None:
    """Raises GenerationFailed if a request's last delta says that it did not end by itself."""
    if output.finish_reason == "error":
        raise GenerationFailed(output.error or "the engine failed on this request", 500, "engine_error")
    if output.finish_reason == "abort":
        raise GenerationFailed(output.error or "the request was aborted by the server", 503, "aborted")
    if output.finish_reason == "timeout" and not output.usage.completion_tokens:
        raise GenerationFailed("the timeout passed before the first token", 504, "timeout")


def error_of(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers. What is no error of ours tells the client nothing of its insides."""
    headers = {}
    if isinstance(error, RequestError):
        status, message, param, code = error.status, error.message, error.param, error.code
        if error.retry_after is not None:
            headers["Retry-After"] = str(max(1, round(error.retry_after)))
        if error.code == "stopping":
            headers["Connection"] = "close"  # the next attempt must find another server
    elif isinstance(error, GenerationFailed):
        status, message, param, code = error.status, str(error), None, error.code
    elif isinstance(error, ClientLeft):
        status, message, param, code = 499, "the client closed the connection", None, "client_closed_request"
    else:
        status, message, param, code = 500, "internal error; the server's log says more", None, "internal_error"
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}, headers


def error_response(error: Exception, headers: dict[str, str]) -> Response:
    status, body, own = error_of(error)
    return Response(orjson.dumps(body), status, {**headers, **own}, media_type="application/json")
