"""A request that BentoML's `traffic.timeout` ends before anything was sent is answered with 504, shaped as its route.

Under `/v1` that is OpenAI's error, elsewhere BentoML's; both bring Retry-After and the request's id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response

from ..openai.errors import GenerationFailed, error_response

RETRY_SECONDS = 5


def too_late(scope: Mapping[str, Any], seconds: float) -> Response:
    """The response to the request of this ASGI scope, which had no answer after `seconds`."""
    message = f"no answer within the {seconds:g} s of the server's traffic.timeout; send a smaller request, or retry"
    headers = {"Retry-After": str(RETRY_SECONDS)}
    if (request_id := Headers(raw=scope["headers"]).get("x-request-id", "")).isascii() and len(request_id) <= 128:
        headers |= {"x-request-id": request_id} if request_id.isprintable() and request_id else {}
    if (scope.get("root_path", "") + scope["path"]).startswith("/v1/"):
        return error_response(GenerationFailed(message, 504, "timeout"), headers)
    return JSONResponse({"error": message}, 504, headers)
