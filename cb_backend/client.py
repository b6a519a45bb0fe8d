"""What HTTP and BentoML need of an engine: `EngineClient`, and the values that cross it.

    engine.open(prompt, params, GenerationOptions(priority=1))    an asynchronous stream of `OutputDelta`s

Front ends are written against this protocol, never against `engine.Engine`: a test puts a scripted engine there, and an
engine in another process may stand behind it. Imports neither torch, nor the engine, nor a web framework.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol

from .errors import RequestError
from .params import SamplingParams
from .request import Logprob, RequestTimings, Usage

Prompt = str | Sequence[int]
Finish = Literal["stop", "length", "abort", "timeout", "error", "tool_calls"]


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How a request is served, beside how its tokens are chosen (`SamplingParams`).

    Attributes:
        priority: lower is served first.
        timeout: seconds from the call on, queueing included; then the output ends with reason `timeout`.
        request_class: groups requests with similar output lengths for the memory forecast.
        salt: requests with different salts never share cached K/V.
        tenant: on whose behalf; reserved, nothing reads it yet.
        trace_context: an OpenTelemetry context, from `telemetry.request_context`.
    """

    priority: int = 0
    timeout: float | None = None
    request_class: str | None = None
    salt: str | None = None
    tenant: str | None = None
    trace_context: Any = None


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What is new of one choice: text, ids and, in its last delta, a `finish_reason`.

    Attributes:
        usage: counts up to here.
        reasoning: what is new of the model's thought; it comes before the text of the same delta.
        prompt_logprobs: in one delta of the request, the one of the first choice that brings them.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None = None
    finish_reason: Finish | None = None
    stop_reason: int | str | None = None
    usage: Usage = Usage()
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    prompt_token_ids: tuple[int, ...] = ()
    timings: RequestTimings | None = None
    error: str | None = None
    reasoning: str = ""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class QueueSlot(Protocol):
    """A slot in the queue for one request whose prompt is still being made. Leaving it twice is leaving it once."""

    def leave(self) -> None: ...

    def __enter__(self) -> QueueSlot: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class ChatRenderer(Protocol):
    """The chat format of a model; `text.chat.ChatTemplate` is one."""

    @property
    def source(self) -> str:
        """The template itself."""

    def tool_call_format(self, template: str | None = None) -> str:
        """The name of the format in which the model writes calls; `template`: one that the request brought."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the conversation.

        Raises:
            RequestError: the messages or options are wrong, or the template refuses them.
        """


class EngineClient(Protocol):
    """An engine as its front ends see it. Its methods are called on an event loop and block it for no step."""

    @property
    def is_ready(self) -> bool:
        """Whether requests are served now."""

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokenizer(self) -> Any:
        """A transformers tokenizer, or None: then prompts are token ids and there is no text."""

    @property
    def chat(self) -> ChatRenderer | None:
        """None without a tokenizer."""

    def enter(self) -> QueueSlot:
        """A slot in the queue, before a prompt is rendered or tokenized; to be left, or given to `open`.

        Raises:
            RequestError: 429, the queue is full.
        """

    def open(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: GenerationOptions = ...,
        *,
        request_id: str | None = None,
        continues_prompt: bool = False,
        slot: QueueSlot | None = None,
    ) -> AsyncGenerator[OutputDelta, None]:
        """Deltas as their tokens come. Closing the generator ends the request in the engine.

        Args:
            request_id: unique among the open ones; default: made here.
            continues_prompt: the text goes on the prompt's, as it must where the two are shown together; else it is
                what decoding its ids alone gives, which for some tokenizers lacks the first word's space.
            slot: from `enter`; default: entered here.

        Raises:
            RequestError: at the first delta, if the request cannot be served.
        """

    def abort(self, request_id: str) -> None:
        """Ends a request: its reader gets what was generated, with reason `abort`. Unknown ids do nothing."""

    def stats(self) -> dict[str, float]:
        """Plain numbers of this moment and counts since the start."""

    def count_refusal(self, error: RequestError) -> None:
        """Counts a request that was refused before it reached the engine; each error once."""
