"""The core nouns: what the engine keeps (`Request`) and what comes back.

What a client asks is in params.py, what a step is in scheduling/plan.py.

There is no prefill or decode state. A request has `num_known` tokens (prompt and generated) and `num_computed` tokens
whose K/V are in the cache; a step makes computed catch up with known. A request that lacks exactly one token decodes.
This module imports no torch.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

from .params import SamplingParams


class FinishReason(str, enum.Enum):
    """Why a request ended in the engine; the values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, summed over its choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0  # of the completion's

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Logprob:
    """One position's log-probabilities: of the chosen token, and of the `top` most likely ones (id, value)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """What settling one step gives to one request's reader. Crosses from the engine thread to the reader's.

    `token_ids` are the new ones (an end id included); `finish_reason` is set on the last delta only.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None = None
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    ends_with_stop_token: bool = False  # the last id is an end id or one of stop_token_ids
    cached_tokens: int = 0
    timings: RequestTimings | None = None  # of the first and the last delta, and of all after a preemption
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Moments of a request's life, `time.monotonic()` seconds (None: did not happen) and counts. Those of `Timings`."""

    arrival: float
    enqueued: float | None
    admitted: float | None
    first_token: float | None
    finished: float | None
    preemptions: int
    swapped_blocks: int
    recomputed_tokens: int


@dataclass(slots=True)
class Timings:
    """What the engine thread writes down while a request is open; readers get `RequestTimings`."""

    arrival: float
    enqueued: float | None = None  # tokenized, its grammar compiled, and sent to the engine thread
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    preemptions: int = 0
    swapped_blocks: int = 0  # copied to host memory by its preemptions
    recomputed_tokens: int = 0

    def freeze(self) -> RequestTimings:
        """The values of this moment."""
        return RequestTimings(
            self.arrival,
            self.enqueued,
            self.admitted,
            self.first_token,
            self.finished,
            self.preemptions,
            self.swapped_blocks,
            self.recomputed_tokens,
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a client sees of one choice: cumulative text, thoughts and ids, and what is new of them."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length", "abort", "timeout", "error", "tool_calls"] | None = None
    stop_reason: int | str | None = None
    usage: Usage = Usage()
    logprobs: tuple[Logprob, ...] | None = None
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    timings: RequestTimings | None = None
    delta: Delta | None = None
    index: int = 0
    error: str | None = None
    choices: tuple[RequestOutput, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    reasoning: str = ""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def with_choices(self, choices: tuple[RequestOutput, ...]) -> RequestOutput:
        """This output as the first of all choices of its request."""
        return replace(self, choices=choices)


@dataclass(frozen=True, slots=True)
class Delta:
    """The new part of one `RequestOutput`."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None = None


class PrivateRoot(NamedTuple):
    """In the place of a salt: only requests with the same root share blocks, also where prefix caching is off."""

    number: int


Salt = str | PrivateRoot


class Status(enum.Enum):
    """Where a request is: `SWAPPED` and `WAITING` hold no device blocks, `RUNNING` holds them for all known tokens."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


class Constraint(Protocol):
    """What structured output asks of a request's next token (see text/grammar.py)."""

    def allowed(self) -> Any:
        """Bit mask over the vocabulary: int32 [ceil(vocab / 32)], 1 = allowed; None: everything is."""

    def accept(self, token_id: int) -> None:
        """`token_id` was chosen."""

    @property
    def finished(self) -> bool:
        """Nothing may follow: the request ends."""

    @property
    def error(self) -> str | None:
        """What went wrong: the request ends with an error."""

    def fork(self) -> Constraint:
        """A copy for another choice of the same request."""


Sink = Callable[[TokenDelta], None]


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the engine. Only the engine thread touches it. `n` choices of a prompt are `n` requests.

    Invariant: 0 <= num_computed <= num_known; while RUNNING, `blocks` covers at least `num_computed` tokens.
    """

    request_id: str
    prompt_len: int
    token_ids: list[int]  # prompt, then generated
    params: SamplingParams
    max_tokens: int  # resolved: never None
    stop_ids: frozenset[int]  # end ids that finish it (empty of eos with ignore_eos)
    seed: int
    timings: Timings
    sink: Sink
    index: int = 0
    priority: int = 0
    order: int = 0  # arrival number: breaks ties, never reused
    deadline: float | None = None  # time.monotonic() seconds
    request_class: str = ""
    salt: Salt = ""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None
    trace_context: Any = None
    status: Status = Status.WAITING
    num_computed: int = 0
    num_in_flight: int = 0  # tokens sampled by planned steps that have not settled yet
    num_cached: int = 0  # prompt tokens whose K/V came from the prefix cache at first admission
    blocks: list[int] = field(default_factory=list)  # device block ids, in token order
    host_blocks: list[int] = field(default_factory=list)  # host pool block ids while SWAPPED
    block_nodes: list[int] = field(default_factory=list)  # prefix-index node of each full block (kv/blocks.py)
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # collected until the prompt is computed
    preempted: bool = False  # lost its memory and has not yet come back
    progressed: bool = True  # made a token since it last came back
    computed_high: int = 0  # most tokens ever computed: what is computed again below it was recomputed
    finish_reason: FinishReason | None = None
    slot: int = -1  # while RUNNING: its row in what is kept for every running sequence (scheduling/memory.py)
    seq_id: int = field(default_factory=itertools.count().__next__)  # never used again, unlike a request id

    @property
    def num_known(self) -> int:
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_settled(self) -> int:
        """Generated tokens that the host has seen."""
        return len(self.token_ids) - self.prompt_len

    @property
    def num_missing(self) -> int:
        """Tokens a step may still compute for it."""
        return self.num_known - self.num_computed

    @property
    def num_output(self) -> int:
        return self.num_known - self.prompt_len

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of service: a lower priority number first, then arrival, then choice."""
        return (self.priority, self.order, self.index)

    @property
    def scores_prompt(self) -> bool:
        """Log-probabilities of its prompt are wanted: of several choices the first one gives them."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def needs_host_tokens(self) -> bool:
        """Its next token depends on the ids before it by more than the K/V: grammar, penalties, banned words."""
        params = self.params
        return (
            self.constraint is not None
            or bool(self.bad_word_ids)
            or params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
