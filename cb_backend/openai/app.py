"""The OpenAI routes as a Starlette application, for any ASGI server. bento/mount.py puts it on a BentoML service.

    app = Starlette(routes=[Mount("/v1", openai_app(engine))])

`GET /models`, `GET /models/{id}`, `POST /completions`, `/chat/completions`, `/responses`, `/tokenize`, `/detokenize`;
under a path that ends in `/v1`, all others are answered with OpenAI's error too. A client that leaves, before or after
the first token, ends its request in the engine. A failure before the first byte has a status of its own; one after it
is an `error` event, and `[DONE]` does not come. `x-request-class` in the headers is `request_class` for clients that
cannot add fields. There is no authentication: every client that reaches the port is served.
"""

from __future__ import annotations

import logging
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from opentelemetry import trace
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from ..client import EngineClient
from ..errors import RequestError
from ..params import SamplingParams
from .answers import Answer, ChatAnswer, CompletionAnswer
from .connection import Receive, read_json, while_connected
from .description import openai_description
from .errors import ClientLeft, GenerationFailed, error_response
from .generation import opened
from .logprobs import TokenTexts
from .protocol import ChatRequest, CompletionRequest, GenerationRequest
from .rendering import Generation
from .responses import ResponsesAnswer, ResponsesRequest
from .stream import Reply, Send
from .tokens import TokenRoutes
from .tool_answers import ToolChatAnswer

logger = logging.getLogger("cb_backend")

MAX_BODY_BYTES = 16 * 2**20
_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

_NOT_SERVED = ("/embeddings", "/moderations", "/images/generations", "/audio/speech")

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]

FindEngine = Callable[[], EngineClient]
R = TypeVar("R", bound=GenerationRequest)


def openai_app(engine: EngineClient, *, max_body_bytes: int = MAX_BODY_BYTES) -> Starlette:
    """The application of one engine.

    Args:
        engine: its client, which may not be ready yet.
        max_body_bytes: a larger body is refused with 413.
    """
    return openai_app_of(lambda: engine, max_body_bytes)


def openai_app_of(find: FindEngine, max_body_bytes: int = MAX_BODY_BYTES) -> Starlette:
    """The application of the engine that `find` gives at each request; it raises RequestError while there is none."""
    models = _Models(find)
    tokens = TokenRoutes(lambda: _ready(find), _check_model, max_body_bytes)
    app = Starlette(
        routes=[
            Route("/models", models.list),
            Route("/models/", models.list),
            Route("/models/{model:path}", models.retrieve),
            Route("/completions", _Completions(find, max_body_bytes), methods=["POST"]),
            Route("/chat/completions", _Chats(find, max_body_bytes), methods=["POST"]),
            Route("/responses", _Responses(find, max_body_bytes), methods=["POST"]),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
            # BentoML answers what no route here matches, in a shape that OpenAI's clients cannot read.
            *(Route(path, _not_served, methods=_METHODS) for path in _NOT_SERVED),
            _Rest("/{rest:path}", _not_served, methods=_METHODS),
        ],
        exception_handlers={HTTPException: _http_exception},
    )
    app.state.describe = openai_description
    return app


def _ready(find: FindEngine) -> EngineClient:
    engine = find()
    if not engine.is_ready:
        raise RequestError("the engine is not running", status=503, code="not_ready", retry_after=5.0)
    return engine


class _Models:
    def __init__(self, find: FindEngine) -> None:
        self._find = find

    async def list(self, request: Request) -> Response:
        try:
            return JSONResponse({"object": "list", "data": [_model_card(_ready(self._find))]})
        except RequestError as error:
            return error_response(error, {})

    async def retrieve(self, request: Request) -> Response:
        try:
            engine = _ready(self._find)
            _check_model(engine, request.path_params["model"])
            return JSONResponse(_model_card(engine))
        except RequestError as error:
            return error_response(error, {})


def _model_card(engine: EngineClient) -> dict[str, Any]:
    return {
        "id": engine.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "cb_backend",
        "max_model_len": engine.max_model_len,
        "tool_call_format": None if engine.chat is None else engine.chat.tool_call_format(),
    }


def _check_model(engine: EngineClient, model: str) -> None:
    if model != engine.model_name:
        raise RequestError(
            f"{model[:200]!r} is not served here; '{engine.model_name}' is",
            path=("model",),
            status=404,
            code="model_not_found",
        )


class _GenerationRoute(ABC, Generic[R]):
    """One POST route, as an ASGI app: read, check, generate, answer."""

    PARSER: type[R]
    PREFIX = ""

    def __init__(self, find: FindEngine, max_body_bytes: int) -> None:
        self._find = find
        self._max_body_bytes = max_body_bytes
        self._texts: WeakKeyDictionary[EngineClient, TokenTexts] = WeakKeyDictionary()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        wanted = request.headers.get("x-request-id", "")
        request_id = wanted if _SAFE_ID.fullmatch(wanted) else uuid.uuid4().hex
        reply = Reply(scope, receive, send, _headers(request_id))
        try:
            body = await read_json(request, self._max_body_bytes)
            engine = _ready(self._find)
            call = self.PARSER.parse(body)
            _check_model(engine, call.model)
            if call.request_class is None and "x-request-class" in request.headers:
                call = call.model_copy(update={"request_class": request.headers["x-request-class"]})
            # A client may use its id twice at once; the engine's must be its own.
            ident = f"{self.PREFIX}-{request_id}-{uuid.uuid4().hex[:8]}"
            stream = bool(call.stream)
            shape = partial(self._shape, engine, call, ident)
            await while_connected(receive, reply.answer(opened(engine, call, ident, stream=stream), shape, stream))
        except Exception as error:
            if isinstance(error, RequestError):
                self._count(error)
            elif not isinstance(error, (GenerationFailed, ClientLeft)):
                logger.exception("request %s failed", request_id)
            await reply.fail(error)

    def _count(self, error: RequestError) -> None:
        """What is refused here never reaches the engine, which counts its own refusals."""
        with suppress(RequestError):  # there is no engine (yet)
            self._find().count_refusal(error)

    @abstractmethod
    def _shape(self, engine: EngineClient, call: R, ident: str, generation: Generation) -> Answer:
        """How what is generated is written."""

    def _token_texts(self, engine: EngineClient, params: SamplingParams) -> TokenTexts | None:
        if params.logprobs is None:
            return None
        if engine.tokenizer is None:
            raise RequestError("this model has no tokenizer to name tokens with", path=("logprobs",))
        found = self._texts.get(engine)
        if found is None:
            found = self._texts[engine] = TokenTexts(engine.tokenizer)
        return found


class _Completions(_GenerationRoute[CompletionRequest]):
    PARSER = CompletionRequest
    PREFIX = "cmpl"

    def _shape(self, engine: EngineClient, call: CompletionRequest, ident: str, generation: Generation) -> Answer:
        return CompletionAnswer(
            ident,
            engine.model_name,
            generation.params,
            self._token_texts(engine, generation.params),
            call.include_usage,
            generation.prompts if call.echo else None,
            engine.tokenizer,
        )


class _Chats(_GenerationRoute[ChatRequest]):
    PARSER = ChatRequest
    PREFIX = "chatcmpl"

    def _shape(self, engine: EngineClient, call: ChatRequest, ident: str, generation: Generation) -> Answer:
        params, texts = generation.params, self._token_texts(engine, generation.params)
        answer: ChatAnswer
        if generation.tools is None or generation.style is None:
            answer = ChatAnswer(ident, engine.model_name, params, texts, call.include_usage)
        else:
            answer = ToolChatAnswer(
                ident, engine.model_name, params, texts, call.include_usage, generation.tools, generation.style
            )
        answer.with_reasoning = call.include_reasoning is not False
        return answer


class _Responses(_GenerationRoute[ResponsesRequest]):
    PARSER = ResponsesRequest
    PREFIX = "resp"

    def _shape(self, engine: EngineClient, call: ResponsesRequest, ident: str, generation: Generation) -> Answer:
        return ResponsesAnswer(ident, engine.model_name, call, generation.params)


def _headers(request_id: str) -> dict[str, str]:
    headers = {"x-request-id": request_id}
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        headers["X-BentoML-Trace-ID"] = f"{span.trace_id:032x}"
    return headers


class _Rest(Route):
    """Every path that is left. Elsewhere than under `/v1` the service around this app has routes of its own there."""

    def matches(self, scope: MutableMapping[str, Any]) -> tuple[Match, MutableMapping[str, Any]]:
        if not scope.get("root_path", "").endswith("/v1"):
            return Match.NONE, {}
        found, child = super().matches(scope)
        # Only partial: a known path with the wrong method is found first and says 405.
        return (Match.PARTIAL if found is Match.FULL else found), child


async def _not_served(request: Request) -> Response:
    message = (
        f"{request.method} {request.url.path[:200]}: not served; there are GET /v1/models and POST /v1/completions, "
        "/v1/chat/completions, /v1/responses, /v1/tokenize and /v1/detokenize"
    )
    return error_response(RequestError(message, status=404, code="unsupported_endpoint"), {})


async def _http_exception(request: Request, error: Any) -> Response:
    """What the router refuses (404, 405) in the shape of all other errors."""
    refusal = RequestError(str(error.detail), status=error.status_code, code="http_error")
    return error_response(refusal, dict(error.headers or {}))
