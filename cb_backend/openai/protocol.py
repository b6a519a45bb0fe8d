"""What a client may send to the OpenAI routes, and what becomes of it.

Names are OpenAI's, and vLLM's for what OpenAI does not have. Types are strict: a string is no number, a boolean is no
integer, null means absent. One rule for fields that do nothing here:

- fields that cannot change the text (`user`, `metadata`, `prompt_cache_key`, ...) are accepted and have no effect;
- fields that would change the text and are not supported (`suffix`, `functions`, `best_of`, ...) are refused with 400,
  except with the value that means "off";
- a field that neither OpenAI nor this server knows is refused with 400, so that a misspelt option cannot go unnoticed.

Bounds that do not need the model are checked by `SamplingParams`; those that do, by the engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, ValidationError

from ..client import GenerationOptions
from ..errors import RequestError, shown
from ..params import SamplingParams, request_error
from ..text.chat import RESERVED_VARIABLES
from ..text.tools import ToolSet
from .shapes import JSON, MAX_PROMPTS, Messages, Prompt, ResponseFormat, ToolChoice, Tools, with_bounds

MAX_BIASES = 4096
MAX_WORDS = 1024
MAX_STOP_IDS = 1024
MAX_STOP_TEXT = 1024  # characters of one stop string; more than there may be strings
MAX_TEMPLATE_KEYS = 64

_CANONICAL_ID = re.compile(r"0|[1-9][0-9]{0,18}")


def _at_most(size: int) -> BeforeValidator:
    """Refuses a longer list, text or object before its values are looked at: each of them may be a fault to tell."""

    def check(value: Any) -> Any:
        if isinstance(value, (list, dict, str)) and len(value) > size:
            raise ValueError(f"must have at most {size} entries, not {len(value)}")
        return value

    return BeforeValidator(check)


class StreamOptions(BaseModel):
    """`include_usage`: one more event, with the token counts and no choices, comes before `[DONE]`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(BaseModel):
    """The fields that completions and chat completions share."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    # Field -> the values that mean "off". Everything else would change the output.
    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, _at_most(MAX_BIASES)] = Field(None, max_length=MAX_BIASES)
    bad_words: Annotated[list[str] | None, _at_most(MAX_WORDS)] = Field(None, max_length=MAX_WORDS)
    seed: int | None = None
    n: int | None = None
    stop: Annotated[str | list[str] | None, _at_most(MAX_STOP_TEXT)] = None
    stop_token_ids: Annotated[list[int] | None, _at_most(MAX_STOP_IDS)] = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat = None

    priority: int | None = Field(None, description="Lower is served first; default 0.")
    timeout: float | None = Field(None, gt=0.0, description="Seconds, queueing included.")
    request_class: str | None = Field(None, max_length=128, description="Groups requests of similar output length.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Different salts never share cached K/V."
    )

    # Without effect on the text.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> JSON:
        """What is accepted, with the bounds that are checked later and the values of refused fields that mean "off"."""
        schema = with_bounds(handler.resolve_ref_schema(handler(core_schema)))
        schema["properties"] |= {name: {"enum": [None, *off]} for name, off in cls.REFUSED.items()}
        return schema

    @classmethod
    def parse(cls, body: Any) -> Any:
        """The request in `body` (parsed JSON).

        Raises:
            RequestError: names the first field at fault.
        """
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object", code="invalid_body")
        kept = {}
        for name, value in body.items():
            if name not in cls.REFUSED:
                kept[name] = value
            elif value is not None and not any(value == off and type(value) is type(off) for off in cls.REFUSED[name]):
                raise RequestError("not supported by this server", path=(name,), code="unsupported_parameter")
        try:
            request = cls(**kept)
        except ValidationError as error:
            raise refusal(error) from None
        if request.stream_options is not None and not request.stream:
            raise RequestError("only allowed with stream: true", path=("stream_options",))
        return request

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self) -> SamplingParams:
        """
        Raises:
            RequestError: names the first field at fault.
        """
        values = self._sampling_values()
        least, most = self.min_tokens, values.get("max_tokens")
        if least is not None and most is not None and least > most:
            raise RequestError(f"{least} is greater than max_tokens {most}", path=("min_tokens",))
        return SamplingParams.parse(values)

    def _sampling_values(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        if self.logit_bias is not None:
            values["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        return values

    def options(self, trace_context: Any = None) -> GenerationOptions:
        """How the engine is to serve it, beside the sampling."""
        return GenerationOptions(
            self.priority or 0, self.timeout, self.request_class, self.cache_salt, trace_context=trace_context
        )


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`. `prompt`: a text, token ids, or a list of either."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"suffix": ("",), "best_of": (1,), "prompt_logprobs": ()}

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt; the engine checks the ids themselves.

        Raises:
            RequestError: it is empty or mixes kinds.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [_not_empty(prompt, "prompt")]
        if not isinstance(prompt, list):
            raise RequestError("must be a string, token ids, or a list of either", path=("prompt",))
        if not prompt:
            raise RequestError("must not be empty", path=("prompt",))
        if not isinstance(prompt[0], (str, list)):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise RequestError(f"at most {MAX_PROMPTS} prompts at once (got {len(prompt)})", path=("prompt",))
        kind = type(prompt[0])
        for i, one in enumerate(prompt):
            if type(one) is not kind:
                raise RequestError(f"'prompt[{i}]': all prompts must be of one kind (got {shown(one)})", param="prompt")
            _not_empty(one, f"prompt[{i}]")
        return prompt

    def _sampling_values(self) -> dict[str, Any]:
        values = super()._sampling_values()
        if self.logprobs is not None:
            values["logprobs"] = self.logprobs
            if self.echo:
                values["prompt_logprobs"] = self.logprobs
        return values


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`. Messages are checked where they are rendered (text/chat.py)."""

    REFUSED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "moderation": (),
        "store": (False,),
        "prompt_logprobs": (),
    }

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = Field(None, description="false: thoughts are left out of the answer.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="Handed to the chat template; `none` turns thinking off where the template can."
    )
    thinking_token_budget: int | None = Field(
        None, ge=0, description="Tokens of the thought before its end is forced; for models that think."
    )

    # Without effect on the text.
    prediction: dict[str, Any] | None = None

    def tool_set(self) -> ToolSet | None:
        """What may be called; None if nothing is to be.

        Raises:
            RequestError: names the first field at fault, also if the answer would have to fit two grammars.
        """
        tools = ToolSet.parse(self.tools, self.tool_choice, self.parallel_tool_calls)
        format_type = (self.response_format or {}).get("type", "text")
        if tools is not None and tools.forced and format_type != "text":
            raise RequestError(f"a forced call excludes response_format {shown(format_type)}", path=("tool_choice",))
        return tools

    def template_options(self) -> dict[str, Any]:
        """Keyword arguments of `ChatTemplate.render`.

        Raises:
            RequestError: `chat_template_kwargs` tries to set what has a field of its own.
        """
        given = self.chat_template_kwargs or {}
        if len(given) > MAX_TEMPLATE_KEYS:
            raise RequestError(f"at most {MAX_TEMPLATE_KEYS} keys (got {len(given)})", path=("chat_template_kwargs",))
        reserved = sorted(RESERVED_VARIABLES.intersection(given))
        if reserved:
            raise RequestError(f"'{reserved[0]}' cannot be set here", path=("chat_template_kwargs",))
        goes_on = bool(self.continue_final_message)
        return {
            "add_generation_prompt": not goes_on if self.add_generation_prompt is None else self.add_generation_prompt,
            "continue_final_message": goes_on,
            "template": self.chat_template,
            "template_kwargs": {**self._effort(), **(self.chat_template_kwargs or {})},
        }

    def _effort(self) -> dict[str, Any]:
        """`reasoning_effort` in the words that templates know."""
        if self.reasoning_effort is None:
            return {}
        thinks = self.reasoning_effort != "none"
        return {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": self.reasoning_effort}

    def _sampling_values(self) -> dict[str, Any]:
        values = super()._sampling_values()
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError(
                f"{self.max_completion_tokens} contradicts max_tokens {self.max_tokens}; send one of them",
                path=("max_completion_tokens",),
            )
        if limits:
            values["max_tokens"] = limits.pop()
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs is not None:
            raise RequestError("only allowed with logprobs: true", path=("top_logprobs",))
        return values


_SAMPLING = tuple(SamplingParams.model_fields.keys() & GenerationRequest.model_fields.keys() - {"logit_bias"})


def _token_id(key: str) -> int:
    if _CANONICAL_ID.fullmatch(key) is None:
        raise RequestError(f"a key is a token id in plain decimal digits (got {shown(key)})", path=("logit_bias",))
    return int(key)


def _not_empty(prompt: Any, where: str) -> Any:
    if not prompt:
        raise RequestError(f"'{where}': must not be empty", param="prompt")
    return prompt


def refusal(error: ValidationError) -> RequestError:
    """The first fault that pydantic found, with the field as the client named it."""
    first = error.errors()[0]
    if first["type"] == "extra_forbidden":
        return RequestError("unknown field", path=first["loc"], code="unknown_parameter")
    if first["type"] == "missing":
        return RequestError("required", path=first["loc"][:1], code="missing_required_parameter")
    # A union's branches are no part of the name that the client knows.
    return request_error(error).at(*first["loc"][:1], code="invalid_type")
