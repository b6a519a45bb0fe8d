"""An engine that says what a test scripts, and a client at the ASGI border that can leave at a chosen moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import nullcontext
from typing import Any

import orjson

from cb_backend.client import EngineClient, GenerationOptions, OutputDelta, Prompt, QueueSlot
from cb_backend.params import SamplingParams
from cb_backend.request import Usage
from cb_backend.text.calls.formats import call_format


def outputs(*texts: str, reason: str = "stop", index: int = 0, error: str | None = None) -> list[OutputDelta]:
    """One delta a text, each of one token, the last one finished."""
    made = []
    for i, text in enumerate(texts):
        last = i == len(texts) - 1
        made.append(
            OutputDelta(
                "scripted",
                index,
                text,
                (i + 1,),
                finish_reason=reason if last else None,  # type: ignore[arg-type]
                usage=Usage(3, i + 1, 2),
                error=error if last else None,
            )
        )
    return made


class ScriptedEngine:
    """Yields `script` for every prompt. An exception in it is raised, an `asyncio.Event` waited for.

    `opened` and `closed` hold the request ids whose streams were begun and ended.
    """

    def __init__(self, script: Sequence[Any], *, ready: bool = True, template: str = "") -> None:
        self.script = script
        self.is_ready = ready
        self.model_name = "scripted"
        self.max_model_len = 100
        self.vocab_size = 100
        self.tokenizer = None
        self.chat = self
        self.source = template
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.refused: list[Exception] = []
        self.waiting = asyncio.Event()  # set when a stream waits for an event of the script

    def tool_call_format(self, template: str | None = None) -> str:
        return call_format(template or self.source).name

    def enter(self) -> Any:
        return nullcontext()

    def count_refusal(self, error: Exception) -> None:
        self.refused.append(error)

    def render(self, messages: list[Any], **options: Any) -> list[int]:
        return [1, 2, 3]

    def abort(self, request_id: str) -> None:
        raise NotImplementedError

    def stats(self) -> dict[str, float]:
        return {}

    async def open(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: GenerationOptions = GenerationOptions(),  # noqa: B008 (it is frozen)
        *,
        request_id: str | None = None,
        continues_prompt: bool = False,
        slot: QueueSlot | None = None,
    ) -> AsyncGenerator[OutputDelta, None]:
        self.opened.append(request_id or "")
        try:
            for item in self.script:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, asyncio.Event):
                    self.waiting.set()
                    await item.wait()
                else:
                    yield item
        finally:
            self.closed.append(request_id or "")


def _is_a_client(engine: ScriptedEngine) -> EngineClient:
    """For the type checker."""
    return engine


class LeavingClient:
    """Posts one request to an ASGI app and keeps what comes back; `leave` closes the connection."""

    def __init__(self, app: Any, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.on_send: Callable[[], None] = lambda: None
        self.answered = asyncio.Event()  # the first byte of a body came
        self._left = asyncio.Event()
        self._body = [orjson.dumps(body)]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(key.lower().encode(), value.encode()) for key, value in (headers or {}).items()],
        }
        self.done = asyncio.ensure_future(app(scope, self._receive, self._send))

    def leave(self) -> None:
        self._left.set()

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.on_send()
        self.messages.append(message)
        if message.get("body"):
            self.answered.set()
