"""What a client asks of one request's tokens (`SamplingParams`), and checks of the texts that come with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from .errors import RequestError, shown

MAX_LOGPROBS = 20  # alternatives per token, as in the OpenAI API
MAX_STOPS = 16
MAX_BANNED = 32_768  # characters of all bad words together
MAX_CHOICES = 128


def _one_or_many(value: Any) -> Any:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not a boolean")
    return value


Int = Annotated[int, BeforeValidator(_no_bool), Field(strict=True)]
Float = Annotated[float, BeforeValidator(_no_bool)]
NonEmpty = Annotated[str, Field(min_length=1, max_length=1024)]


class Thinking(BaseModel):
    """How the thoughts of a reasoning model are told from its answer: stop strings and `response_format` concern the
    answer alone, and the thought comes as `reasoning`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["harmony", "mistral", "seed", "kimi", "granite", "reasoning", "think"]
    opened: bool = Field(False, description="The prompt ends within the thought.")
    budget: Int | None = Field(None, ge=0, description="Tokens of the thought before its end is forced.")


class SamplingParams(BaseModel):
    """How the tokens of one request are chosen. Names are those of the OpenAI API and vLLM.

    Order of the filters on one row of logits, float32 [vocab_size]: logit_bias, bad_words and min_tokens masks;
    repetition, presence and frequency penalties; temperature; top_k; top_p; min_p; then Gumbel-max with stateless noise
    (`hash(seed, position, token id)`), so that neither neighbours nor preemption change the outcome.

    Attributes:
        max_tokens: most tokens to generate, 0 or more; None: to the end of the context.
        min_tokens: tokens before which no end id and no stop string ends the request, at most `max_tokens`.
        temperature: divides the logits, 0 to 100; below 1e-5 the largest logit is taken.
        top_p: keeps the smallest set of tokens with at least this probability, above 0 to 1 (1: off). Holtzman et al.,
            2020.
        top_k: keeps so many tokens; 0 or -1: off.
        min_p: keeps tokens with at least this share of the best one's probability, 0 to 1 (0: off).
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output, 0.01 to 100
            (1: off). Keskar et al., 2019.
        presence_penalty: subtracted from the logit of each token in the output, -2 to 2.
        frequency_penalty: the same times the token's count in the output, -2 to 2.
        logit_bias: added to logits by token id, -100 to 100 each.
        bad_words: texts that are not generated, each of 1 to 1,024 characters, of 32,768 in all.
        seed: any 64-bit integer; choice i has the seed `seed + i`. None: drawn from the engine's seed.
        n: choices, 1 to 128.
        stop: up to 16 texts of 1 to 1,024 characters; the output ends before the first that appears.
        stop_token_ids: up to 1,024 ids that end the output besides the model's end ids.
        ignore_eos: the model's end ids do not end the output.
        include_stop_str_in_output: keep the stop string that ended the output.
        skip_special_tokens: leave special tokens out of the text (not out of the ids).
        logprobs: log-probabilities of output tokens with so many of the most likely ones, 0 to 20; None: off.
        prompt_logprobs: the same for the prompt.
        response_format: `{"type": ...}` with `json_object`, `json_schema`, `regex` or `choice`: what the text must be.

    Raises:
        pydantic.ValidationError: a value is outside its range; `parse` makes it a `RequestError` that names the field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_tokens: Int | None = Field(None, ge=0, description="None: to the end of the context.")
    min_tokens: Int = Field(0, ge=0, description="No end id before this many tokens.")
    temperature: Float = Field(1.0, ge=0.0, le=100.0, description="0 is greedy.")
    top_p: Float = Field(1.0, gt=0.0, le=1.0)
    top_k: Int = Field(0, ge=-1, description="0 or -1: off.")
    min_p: Float = Field(0.0, ge=0.0, le=1.0)
    # A smaller one could take a score past what float32 holds, and the request would end as an error of the server.
    repetition_penalty: Float = Field(1.0, ge=0.01, le=100.0)
    presence_penalty: Float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: Float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: dict[int, Annotated[Float, Field(ge=-100.0, le=100.0)]] = Field(default_factory=dict)
    bad_words: Annotated[tuple[NonEmpty, ...], BeforeValidator(_one_or_many)] = ()
    seed: Int | None = Field(None, ge=-(2**63), lt=2**63, description="Choice i has the seed `seed + i`.")
    n: Int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Annotated[tuple[NonEmpty, ...], BeforeValidator(_one_or_many)] = Field((), max_length=MAX_STOPS)
    stop_token_ids: tuple[Int, ...] = Field((), max_length=1024)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Top alternatives per output token.")
    prompt_logprobs: Int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="The same for the prompt.")
    response_format: Mapping[str, Any] | None = Field(
        None, description="`json_object`, `json_schema`, `regex` or `choice`."
    )

    thinking: Thinking | None = Field(None, description="The model's thoughts; None: its text is shown as it comes.")
    shown_special_tokens: tuple[NonEmpty, ...] = Field(
        (), max_length=64, description="Special tokens that are text although `skip_special_tokens` hides the others."
    )

    @model_validator(mode="after")
    def _bounded_words(self) -> SamplingParams:
        banned = sum(map(len, self.bad_words))
        if banned > MAX_BANNED:
            raise ValueError(f"bad_words have {banned} characters in all, more than {MAX_BANNED}")
        return self

    @model_validator(mode="after")
    def _min_below_max(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is greater than max_tokens {self.max_tokens}")
        return self

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Builds parameters from a client's fields.

        Raises:
            RequestError: names the first field at fault, its allowed range and the value it had.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            raise request_error(error) from None

    @property
    def greedy(self) -> bool:
        """The most likely token is taken instead of sampling."""
        # Below this, exp((a - b) / T) is 0 for any two distinct float32 logits, and dividing by it would overflow.
        return self.temperature < 1e-5


def request_error(error: ValidationError) -> RequestError:
    """The first fault of pydantic's report, with its path, its reason and the value."""
    first = error.errors()[0]
    path = tuple(part for part in first["loc"] if not str(part).startswith("function-"))
    reason = first["msg"].removeprefix("Value error, ")
    return RequestError(f"{reason[0].lower() + reason[1:]} (got {shown(first.get('input'))})", path=path)


def check_text(value: Any, *path: str | int) -> str:
    """A string that a client gave for the field at `path`: JSON and Python can spell half of a surrogate pair, which is
    no character, and which neither a tokenizer nor a span or a metric takes.

    Raises:
        RequestError: it is no string, or not one of whole characters.
    """
    if not isinstance(value, str):
        raise RequestError(f"must be text (got {shown(value)})", path=path)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ord(value[error.start])
        raise RequestError(f"holds U+{half:04X}, half of a surrogate pair", path=path) from None
    return value


def check_texts(fields: Any, *path: str | int) -> None:
    """`check_text` for every string in a structure of mappings and sequences below `path`, keys included.

    Raises:
        RequestError: names the path of the first one at fault.
    """
    rest = [(fields, path)]
    while rest:  # a stack of its own: a client's nesting must not exhaust Python's
        value, where = rest.pop()
        if isinstance(value, str):
            check_text(value, *where)
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                shown = key if isinstance(key, str) and key.isprintable() else repr(key)
                check_text(str(key), *where, shown)
                rest.append((inner, (*where, shown)))
        elif isinstance(value, (list, tuple)):
            rest += [(inner, (*where, i)) for i, inner in enumerate(value) if not isinstance(inner, (int, float))]
