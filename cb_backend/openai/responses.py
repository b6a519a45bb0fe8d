"""`POST /responses`: OpenAI's newer text interface over the same chats. Nothing is stored.

What is supported: `input` as text or as messages of text parts, `instructions`, `max_output_tokens`, `text.format`, and
the sampling fields of the other routes. What needs storage or tools (`previous_response_id`, `conversation`, `store`,
`background`, `tools`, ...) is refused. A stream is named events with a running `sequence_number` and without `[DONE]`;
the last is `response.completed`, `response.incomplete` if the length ended it, or `error`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson
from pydantic import BaseModel, ConfigDict

from ..client import OutputDelta
from ..errors import RequestError, shown
from ..params import SamplingParams
from ..request import RequestOutput
from ..text.response_format import nested
from .answers import Answer, finish_reason
from .protocol import GenerationRequest
from .shapes import Input, TextFormat

_TEXT_PARTS = ("input_text", "output_text", "text")


class TextOptions(BaseModel):
    """`text`: the format of the answer."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: TextFormat = None
    verbosity: str | None = None


class ResponsesRequest(GenerationRequest):
    """What a client may send; `store` is false here whether it is sent or not."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "n": (1,),
        "max_tokens": (),
        "response_format": (),
        "stream_options": ({}, {"include_obfuscation": False}),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "max_tool_calls": (),
        "store": (False,),
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "include": ([],),
        "prompt": (),
        "reasoning": ({}, {"effort": None}, {"effort": None, "summary": None}),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "moderation": (),
        "image": (),
        "access_programs": (),
        "background_options": (),
        "context_management": (),
    }

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None

    # Without effect on the text.
    parallel_tool_calls: bool | None = None

    def messages(self) -> list[Any]:
        """The chat that `instructions` and `input` are.

        Raises:
            RequestError: an item that is no message.
        """
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*system, {"role": "user", "content": self.input}]
        if not isinstance(self.input, list) or not self.input:
            raise RequestError("must be a text or a list of messages", path=("input",))
        return [*system, *(_message(self.input[i], i) for i in self._spoken())]

    def _spoken(self) -> list[int]:
        """The numbers of the items that a chat holds: thoughts that are sent back are not shown to the model again."""
        thoughts = [isinstance(item, dict) and item.get("type") == "reasoning" for item in self.input]
        return [i for i, thought in enumerate(thoughts) if not thought]

    def path_of(self, path: tuple[str | int, ...]) -> tuple[str | int, ...]:
        """Where the client finds the field at `path` below the `messages` that were made of its request."""
        _messages, *rest = path
        if not rest:
            return ("input",)
        number, *field = rest
        shown = int(number) - bool(self.instructions)  # `instructions` came first: the client counts its own items
        if shown < 0:
            return ("instructions", *field)
        return ("input", shown if isinstance(self.input, str) else self._spoken()[shown], *field)

    def _sampling_values(self) -> dict[str, Any]:
        values = super()._sampling_values()
        if self.max_output_tokens is not None:
            if self.max_output_tokens < 1:
                raise RequestError(f"must be at least 1 (got {self.max_output_tokens})", path=("max_output_tokens",))
            values["max_tokens"] = self.max_output_tokens
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            raise RequestError("not supported by this server", path=("text", "verbosity"))
        wanted = self.text.format if self.text is not None else None
        if wanted is not None:
            values["response_format"] = nested(wanted)
        return values


def _message(item: Any, number: int) -> Any:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        raise RequestError(f"only messages are supported (got {shown(item)})", path=("input", number))
    content = item.get("content")
    if isinstance(content, list):
        content = [
            {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else part
            for part in content
        ]
    return {"role": item.get("role"), "content": content, "name": item.get("name")}


class ResponsesAnswer(Answer):
    """One output message with one text; before it one reasoning item, if the model had a thought."""

    def __init__(self, ident: str, model: str, call: ResponsesRequest, params: SamplingParams) -> None:
        super().__init__(ident, model, params, None, False)
        self._thought: list[str] = []
        self._thought_id = f"rs_{ident}"
        self._opened = self._thought_opened = self._thought_closed = False
        self._number = 0
        self._pieces: list[str] = []
        self._message_id = f"msg_{ident}"
        self._shape: dict[str, Any] = {
            "id": ident,
            "object": "response",
            "created_at": int(time.time()),
            "background": False,
            "error": None,
            "instructions": call.instructions,
            "max_output_tokens": call.max_output_tokens,
            "metadata": call.metadata or {},
            "model": model,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if call.temperature is None else call.temperature,
            "text": {"format": (call.text.format if call.text is not None else None) or {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if call.top_p is None else call.top_p,
            "truncation": "disabled",
            **({} if call.user is None else {"user": call.user}),
        }

    def body(self, outputs: Mapping[int, RequestOutput]) -> bytes:
        self._usage = {0: outputs[0].usage}
        return orjson.dumps(self._choice(0, outputs[0]))

    def last_events(self) -> bytes:
        return b""

    def _events(self, choice: int, delta: OutputDelta, first: bool) -> bytes:
        ends = delta.finish_reason is not None
        events = []
        if first:
            begun = {**self._shape, "status": "in_progress", "incomplete_details": None, "output": []}
            events += [
                self._named("response.created", response=begun),
                self._named("response.in_progress", response=begun),
            ]
        if delta.reasoning:
            events += self._thinking(delta.reasoning)
        if self._thought_opened and not self._thought_closed and (delta.text or ends):
            events += self._thought_ends()
        # A thought may still come first, and then it is the first item.
        if not self._opened and (delta.text or ends or not self._thinks):
            self._opened = True
            item = {**self._message("in_progress"), "content": []}
            events += [
                self._named("response.output_item.added", output_index=self._index, item=item),
                self._named("response.content_part.added", part=_part(""), **self._place),
            ]
        place = self._place
        if delta.text:
            self._pieces.append(delta.text)
            events.append(self._named("response.output_text.delta", delta=delta.text, logprobs=[], **place))
        if delta.finish_reason is not None:
            text = "".join(self._pieces)
            whole = self._whole(text, finish_reason(delta))
            events += [
                self._named("response.output_text.done", text=text, logprobs=[], **place),
                self._named("response.content_part.done", part=_part(text), **place),
                self._named("response.output_item.done", output_index=self._index, item=whole["output"][-1]),
                self._named(f"response.{whole['status']}", response=whole),
            ]
        return b"".join(events)

    @property
    def _index(self) -> int:
        """The message's place among the items."""
        return int(self._thought_opened)

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": self._index, "item_id": self._message_id, "content_index": 0}

    def _thinking(self, text: str) -> list[bytes]:
        events = []
        if self._opened:  # a thought between two parts of the answer has no item of its own in a stream
            return []
        if not self._thought_opened:
            self._thought_opened = True
            item = {**self._reasoning("in_progress", ""), "content": []}
            events.append(self._named("response.output_item.added", output_index=0, item=item))
        self._thought.append(text)
        place = {"output_index": 0, "item_id": self._thought_id, "content_index": 0}
        return [*events, self._named("response.reasoning_text.delta", delta=text, **place)]

    def _thought_ends(self) -> list[bytes]:
        self._thought_closed = True
        text = "".join(self._thought)
        place = {"output_index": 0, "item_id": self._thought_id, "content_index": 0}
        item = self._reasoning("completed", text)
        return [
            self._named("response.reasoning_text.done", text=text, **place),
            self._named("response.output_item.done", output_index=0, item=item),
        ]

    def _reasoning(self, status: str, text: str) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": text}]
        return {"id": self._thought_id, "type": "reasoning", "summary": [], "status": status, "content": content}

    def error_event(self, body: dict[str, Any]) -> bytes:
        """By OpenAI's description with its fields beside each other; their client looks for them under `error`."""
        return self._named("error", **{name: body["error"][name] for name in ("message", "param", "code")}, **body)

    def _named(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)

    def _choice(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        """The whole response: it has one choice."""
        self._thought = [output.reasoning]
        return self._whole(output.text, finish_reason(output))

    def _whole(self, text: str, reason: str | None) -> dict[str, Any]:
        cut = reason == "length"
        status = "incomplete" if cut else "completed"
        usage = self.usage()
        thoughts = "".join(self._thought)
        thought = [self._reasoning("completed", thoughts)] if thoughts else []
        return {
            **self._shape,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [*thought, {**self._message(status), "content": [_part(text)]}],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
                "total_tokens": usage["total_tokens"],
            },
        }

    def _message(self, status: str) -> dict[str, Any]:
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
