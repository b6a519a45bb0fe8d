"""What an engine generates to OpenAI's response bodies and stream events, for completions and for chat.

An event is `data: `, one line of JSON, and an empty line. What is equal in all events of a stream is encoded once.
Choices are numbered prompt by prompt: choice `p * n + i` is the i-th of prompt p.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from ..client import OutputDelta
from ..params import SamplingParams
from ..request import Logprob, RequestOutput, Usage
from ..text.detokenizer import decoder_of, text_before
from .logprobs import CompletionLogprobs, TokenTexts, chat_logprobs

DONE = b"data: [DONE]\n\n"


def event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


class Answer(ABC):
    """What is common to both routes. One object per HTTP request; it remembers what was sent of each choice."""

    OBJECT = ""
    CHUNK = ""

    def __init__(self, ident: str, model: str, params: SamplingParams, tokens: TokenTexts | None, with_usage: bool):
        created = int(time.time())
        self._whole_head = {"id": ident, "object": self.OBJECT, "created": created, "model": model}
        self._chunk_head = {"id": ident, "object": self.CHUNK, "created": created, "model": model}
        self._n = params.n
        self._skip_special_tokens = params.skip_special_tokens
        self._tokens = tokens if params.logprobs is not None else None
        self._with_usage = with_usage
        self._thinks = params.thinking is not None
        self._usage: dict[int, Usage] = {}  # of the choices that began, newest counts
        self._open = b"data: " + orjson.dumps(self._chunk_head)[:-1] + b',"choices":[{"index":'
        self._close = b"}]" + (b',"usage":null' if with_usage else b"") + b"}\n\n"

    def events(self, choice: int, delta: OutputDelta) -> bytes:
        """The events that `delta` adds to the stream; may be empty."""
        first = choice not in self._usage
        self._usage[choice] = delta.usage
        return self._events(choice, delta, first)

    def last_events(self) -> bytes:
        if not self._with_usage:
            return DONE
        return event({**self._chunk_head, "choices": [], "usage": self.usage()}) + DONE

    def error_event(self, body: dict[str, Any]) -> bytes:
        """The last event of a stream that broke; `body`: an error in OpenAI's shape."""
        return event(body)

    def body(self, outputs: Mapping[int, RequestOutput]) -> bytes:
        """The whole answer, from the whole output of each choice."""
        self._usage = {choice: output.usage for choice, output in outputs.items()}
        choices = [self._choice(choice, outputs[choice]) for choice in sorted(outputs)]
        return orjson.dumps({**self._whole_head, "choices": choices, "usage": self.usage()})

    def usage(self) -> dict[str, Any]:
        # The choices of one prompt share it: it counts once.
        prompts = [usage for choice, usage in self._usage.items() if choice % self._n == 0]
        prompt_tokens = sum(usage.prompt_tokens for usage in prompts)
        completion_tokens = sum(usage.completion_tokens for usage in self._usage.values())
        thought = sum(usage.reasoning_tokens for usage in self._usage.values())
        return {
            **({"completion_tokens_details": {"reasoning_tokens": thought}} if self._thinks else {}),
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts)},
        }

    @abstractmethod
    def _events(self, choice: int, delta: OutputDelta, first: bool) -> bytes:
        """The events of one delta; `first`: the choice's first one."""

    @abstractmethod
    def _choice(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        """The choice in a whole answer."""

    def _event(self, choice: int, content: bytes, logprobs: bytes, delta: OutputDelta) -> bytes:
        ending = b"null" if delta.finish_reason is None else orjson.dumps(finish_reason(delta))
        if delta.stop_reason is not None:
            ending += b',"stop_reason":' + orjson.dumps(delta.stop_reason)
        parts = (
            self._open,
            b"%d," % choice,
            content,
            b',"logprobs":',
            logprobs,
            b',"finish_reason":',
            ending,
            self._close,
        )
        return b"".join(parts)


class ChatAnswer(Answer):
    """`with_reasoning`: thoughts are sent, as `reasoning_content`."""

    with_reasoning = True
    OBJECT = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def _events(self, choice: int, delta: OutputDelta, first: bool) -> bytes:
        text, news = delta.text, delta.logprobs if self._tokens is not None else None
        role = (self._role(choice) if first else b"") + self._thought(choice, delta)
        if not text and not news and delta.finish_reason is None:
            return role
        content = b'"delta":{"content":' + orjson.dumps(text) + b"}" if text or news else b'"delta":{}'
        return role + self._event(choice, content, self._logprobs(news), delta)

    def _choice(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        logprobs = None
        if self._tokens is not None:
            logprobs = chat_logprobs(self._tokens, output.logprobs or ())
        return {
            "index": choice,
            "message": {"role": "assistant", "content": output.text, "refusal": None} | self._thoughts(output),
            "logprobs": logprobs,
            "finish_reason": finish_reason(output),
            "stop_reason": output.stop_reason,
        }

    def _thought(self, choice: int, delta: OutputDelta) -> bytes:
        """The event of what is new of the thought, which comes before the text; none if there is nothing."""
        if not delta.reasoning or not self.with_reasoning:
            return b""
        content = b'"delta":{"reasoning_content":' + orjson.dumps(delta.reasoning) + b"}"
        return self._event(choice, content, b"null", replace(delta, finish_reason=None, stop_reason=None))

    def _thoughts(self, output: RequestOutput) -> dict[str, Any]:
        return {"reasoning_content": output.reasoning} if output.reasoning and self.with_reasoning else {}

    def _role(self, choice: int) -> bytes:
        head = b'"delta":{"role":"assistant","content":""}'
        parts = (self._open, b"%d," % choice, head, b',"logprobs":null,"finish_reason":null', self._close)
        return b"".join(parts)

    def _logprobs(self, news: Sequence[Logprob] | None) -> bytes:
        return b"null" if not news or self._tokens is None else orjson.dumps(chat_logprobs(self._tokens, news))


class CompletionAnswer(Answer):
    """`echo`: the prompts, to be repeated before their completions."""

    OBJECT = "text_completion"
    CHUNK = "text_completion"

    def __init__(
        self,
        ident: str,
        model: str,
        params: SamplingParams,
        tokens: TokenTexts | None,
        with_usage: bool,
        echo: Sequence[str | Sequence[int]] | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__(ident, model, params, tokens, with_usage)
        self._echo = echo
        self._tokenizer = tokenizer
        self._shapes: dict[int, CompletionLogprobs] = {}
        self._prompt_logprobs: dict[int, Sequence[Logprob | None]] = {}

    def _events(self, choice: int, delta: OutputDelta, first: bool) -> bytes:
        text, values = delta.text, delta.logprobs or ()
        ids = delta.token_ids[: len(values)]
        echoed = first and self._echo is not None
        logprobs = b"null"
        if self._tokens is not None and (values or echoed):
            logprobs = orjson.dumps(self._logprobs(self._tokens, choice, delta, echoed, ids, values))
        if echoed:
            text = self._prompt_text(choice) + text
        elif not text and logprobs == b"null" and delta.finish_reason is None:
            return b""
        return self._event(choice, b'"text":' + orjson.dumps(text), logprobs, delta)

    def _choice(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        echoed = self._echo is not None
        logprobs = None
        if self._tokens is not None:
            values = output.logprobs or ()
            logprobs = self._logprobs(self._tokens, choice, output, echoed, output.token_ids, values)
        return {
            "index": choice,
            "text": self._prompt_text(choice) + output.text if echoed else output.text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(output),
            "stop_reason": output.stop_reason,
        }

    def _logprobs(
        self,
        tokens: TokenTexts,
        choice: int,
        output: RequestOutput | OutputDelta,
        echoed: bool,
        ids: Sequence[int],
        values: Sequence[Logprob | None],
    ) -> dict[str, Any]:
        """Of these tokens of the output, after those of the prompt if that is `echoed` now."""
        shape = self._shapes.setdefault(choice, CompletionLogprobs(tokens, self._skip_special_tokens))
        prompt = choice // self._n
        if output.prompt_logprobs is not None:  # they come with the first choice
            self._prompt_logprobs[prompt] = output.prompt_logprobs
        before = self._prompt_logprobs.get(prompt) if echoed else None
        if before is None:
            return shape.piece(ids, values)
        head = shape.prompt(self._prompt_text(choice), output.prompt_token_ids, before)
        return {key: head[key] + rest for key, rest in shape.piece(ids, values).items()}

    def _prompt_text(self, choice: int) -> str:
        """What is shown of the prompt before the text that goes on it."""
        prompt = self._echo[choice // self._n] if self._echo is not None else ""
        if isinstance(prompt, str):
            return prompt if self._tokenizer is None else text_before(prompt)
        return "" if self._tokenizer is None else text_before(decoder_of(self._tokenizer, False)(list(prompt)))


def finish_reason(output: RequestOutput | OutputDelta) -> str | None:
    """OpenAI's word: a request that its own timeout cut short is as incomplete as one that its length did."""
    return "length" if output.finish_reason == "timeout" else output.finish_reason
