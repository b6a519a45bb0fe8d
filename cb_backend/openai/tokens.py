"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes: what a prompt or a chat becomes, and the way back.

    {"model", "prompt", "add_special_tokens": true, "return_token_strs": false}           -> {"tokens": [...], ...}
    {"model", "messages", "tools", "add_generation_prompt", "return_token_strs", ...}     -> {"tokens": [...], ...}
    {"model", "tokens": [...]}                                                             -> {"prompt": "..."}

`model` may be absent. The answer to the first two also holds `count`, `max_model_len` and `token_strs`, the tokens as
the vocabulary spells them. Token ids are those that the generation routes would compute.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from ..client import EngineClient
from ..errors import RequestError, shown
from ..text.detokenizer import decoder_of
from .connection import read_json
from .errors import ClientLeft, error_response
from .protocol import ChatRequest, refusal
from .rendering import INLINE, render_chat, renderer

logger = logging.getLogger("cb_backend")

Work = Callable[[EngineClient, Any], Awaitable[dict[str, Any]]]

# Ids that `/detokenize` takes where the model's context is shorter; no prompt holds more than the context.
MIN_TOKENS = 65_536


class _TokenRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: str | None = None

    @classmethod
    def parse(cls, body: Any) -> Any:
        """
        Raises:
            RequestError: names the first field at fault.
        """
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object", code="invalid_body")
        try:
            return cls(**body)
        except ValidationError as error:
            raise refusal(error) from None


class TokenizeRequest(_TokenRequest):
    CHAT_FIELDS: ClassVar[tuple[str, ...]] = (
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
    )

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(_TokenRequest):
    tokens: list[Any]  # checked at once, by their types and range: there may be many


class TokenRoutes:
    """Args:
    engine: gives the engine, or raises RequestError while there is none.
    check_model: raises RequestError for a model that is not served.
    """

    def __init__(
        self, engine: Callable[[], EngineClient], check_model: Callable[[EngineClient, str], None], max_body_bytes: int
    ) -> None:
        self._engine = engine
        self._check_model = check_model
        self._max_body_bytes = max_body_bytes

    async def tokenize(self, request: Request) -> Response:
        return await self._answer(request, self._tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._answer(request, self._detokenize)

    async def _answer(self, request: Request, work: Work) -> Response:
        try:
            body = await read_json(request, self._max_body_bytes)
            engine = self._engine()
            if isinstance(body, dict) and isinstance(body.get("model"), str):
                self._check_model(engine, body["model"])
            if engine.tokenizer is None:
                raise RequestError("this model has no tokenizer", code="no_tokenizer")
            return Response(orjson.dumps(await work(engine, body)), media_type="application/json")
        except Exception as error:
            if not isinstance(error, (RequestError, ClientLeft)):
                logger.exception("a token request failed")
            return error_response(error, {})

    async def _tokenize(self, engine: EngineClient, body: Any) -> dict[str, Any]:
        strings = False
        if isinstance(body, dict) and "messages" in body:
            ids, strings = await self._tokenize_chat(engine, dict(body))
        else:
            call = TokenizeRequest.parse(body)
            encode, strings = engine.tokenizer, call.return_token_strs
            if len(call.prompt) > INLINE:
                found = await asyncio.to_thread(encode, call.prompt, add_special_tokens=call.add_special_tokens)
            else:
                found = encode(call.prompt, add_special_tokens=call.add_special_tokens)
            ids = found["input_ids"]
        return {
            "count": len(ids),
            "max_model_len": engine.max_model_len,
            "tokens": ids,
            "token_strs": engine.tokenizer.convert_ids_to_tokens(ids) if strings else None,
        }

    @staticmethod
    async def _tokenize_chat(engine: EngineClient, body: dict[str, Any]) -> tuple[list[int], bool]:
        strings = body.pop("return_token_strs", None)
        if strings is not None and not isinstance(strings, bool):
            raise RequestError("must be a boolean", path=("return_token_strs",))
        adds = body.pop("add_special_tokens", None)
        if adds is not None and adds is not False:
            raise RequestError("a chat template writes them itself", path=("add_special_tokens",))
        unknown = sorted(body.keys() - {"model", *TokenizeRequest.CHAT_FIELDS})
        if unknown:
            raise RequestError("unknown field", path=(unknown[0],), code="unknown_parameter")
        if body.get("model") is None:
            body["model"] = engine.model_name
        call = ChatRequest.parse(body)
        return await render_chat(renderer(engine), call, call.tool_set()), bool(strings)

    @staticmethod
    async def _detokenize(engine: EngineClient, body: Any) -> dict[str, Any]:
        call = DetokenizeRequest.parse(body)
        tokens, most = call.tokens, max(MIN_TOKENS, engine.max_model_len)
        if len(tokens) > most:
            raise RequestError(f"at most {most} ids (got {len(tokens)})", path=("tokens",))
        if tokens and not (set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < engine.vocab_size):
            known = range(engine.vocab_size)
            wrong = next(t for t in tokens if type(t) is not int or t not in known)
            raise RequestError(f"{shown(wrong)} is no id from 0 to {engine.vocab_size - 1}", path=("tokens",))
        return {"prompt": await asyncio.to_thread(decoder_of(engine.tokenizer, False), call.tokens)}
