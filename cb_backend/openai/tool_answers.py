"""Chat answers that may hold tool calls: `message.tool_calls`, or deltas with a name first and then its arguments.

`finish_reason` is "tool_calls" if the model ended by itself and called something; an answer cut short says "length",
and its last arguments may be no whole JSON.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any, TypeVar

import orjson

from ..client import OutputDelta
from ..params import SamplingParams
from ..request import RequestOutput
from ..text.calls.base import CallFormat
from ..text.tool_parser import CallArguments, CallStart, Piece, Text, ToolParser
from ..text.tools import ToolSet
from .answers import ChatAnswer
from .logprobs import TokenTexts

Output = TypeVar("Output", RequestOutput, OutputDelta)


class ToolChatAnswer(ChatAnswer):
    """Args beside those of all answers:
    tools: what may be called.
    style: how the model writes calls.
    """

    def __init__(
        self,
        ident: str,
        model: str,
        params: SamplingParams,
        tokens: TokenTexts | None,
        with_usage: bool,
        tools: ToolSet,
        style: CallFormat,
    ) -> None:
        super().__init__(ident, model, params, tokens, with_usage)
        self._tools = tools
        self._style = style
        self._parsers: dict[int, ToolParser] = {}

    def _events(self, choice: int, delta: OutputDelta, first: bool) -> bytes:
        parser = self._parsers.setdefault(choice, self._parser())
        pieces = self._allowed(parser.push(delta.text))
        if delta.finish_reason is not None:
            pieces += self._allowed(parser.finish())
        contents = [b'"delta":' + orjson.dumps(self._delta(piece)) for piece in pieces]
        news = delta.logprobs if self._tokens is not None else None
        if not contents and (news or delta.finish_reason is not None):
            contents = [b'"delta":{}']
        events = [self._role(choice)] if first else []
        events.append(self._thought(choice, delta))
        logprobs = self._logprobs(news)
        for i, content in enumerate(contents):
            ends = i == len(contents) - 1
            state = self._ended(delta, parser.calls) if ends else replace(delta, finish_reason=None, stop_reason=None)
            events.append(self._event(choice, content, logprobs if i == 0 else b"null", state))
        return b"".join(events)

    def _choice(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        parser = self._parser()
        text, calls = "", []
        for piece in self._allowed(parser.push(output.text) + parser.finish()):
            if isinstance(piece, Text):
                text += piece.text
            elif isinstance(piece, CallStart):
                calls.append(self._call(piece))
            else:
                calls[-1]["function"]["arguments"] += piece.piece
        whole = super()._choice(choice, self._ended(output, len(calls)))
        whole["message"]["content"] = text if text or not calls else None
        if calls:
            whole["message"]["tool_calls"] = calls
        return whole

    def _parser(self) -> ToolParser:
        return ToolParser(self._style, self._tools.functions)

    def _allowed(self, pieces: list[Piece]) -> list[Piece]:
        """Without parallel calls only the first one counts."""
        if self._tools.parallel:
            return pieces
        return [piece for piece in pieces if isinstance(piece, Text) or piece.index == 0]

    def _delta(self, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, Text):
            return {"content": piece.text}
        if isinstance(piece, CallArguments):
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.piece}}]}
        return {"tool_calls": [{"index": piece.index, **self._call(piece)}]}

    def _call(self, start: CallStart) -> dict[str, Any]:
        # Mistral's template takes ids of nine letters and digits only, and the client sends them back.
        made = uuid.uuid4().hex[:9] if self._style.idents == "nine" else f"call_{uuid.uuid4().hex[:24]}"
        return {"id": start.ident or made, "type": "function", "function": {"name": start.name, "arguments": ""}}

    @staticmethod
    def _ended(output: Output, calls: int) -> Output:
        return replace(output, finish_reason="tool_calls") if calls and output.finish_reason == "stop" else output
