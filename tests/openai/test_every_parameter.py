"""Each sampling parameter through HTTP: a request that has it is answered otherwise than one that has not, and every
field of OpenAI's own library is known.

The checks themselves, against transformers' processors, are in tests/sampling/test_sampler.py; here nothing may be lost
on the way from a body's field to the sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams

from cb_backend import Engine, SamplingParams
from cb_backend.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from cb_backend.openai.responses import ResponsesRequest

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 16}
HOT: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 16, "seed": 5}
END = 2  # the model's end id: <|im_end|>, a special token
TO_THE_END = {"logit_bias": {str(END): 100}, "temperature": 0, "max_tokens": 6}

Answer = dict[str, Any]


def same(plain: Answer, changed: Answer) -> bool:
    return plain["choices"] == changed["choices"]


def tokens(answer: Answer) -> list[str]:
    return answer["choices"][0]["logprobs"]["tokens"]


def text(answer: Answer) -> str:
    return answer["choices"][0]["text"]


# parameter: (the request without it, the parameter's fields, what must hold of both answers)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Answer, Answer], bool]]] = {
    "max_tokens": (GREEDY, {"max_tokens": 3}, lambda a, b: b["usage"]["completion_tokens"] == 3),
    "min_tokens": (
        TO_THE_END,
        {"min_tokens": 4},
        lambda a, b: (a["usage"]["completion_tokens"], b["usage"]["completion_tokens"]) == (1, 5),
    ),
    "temperature": (HOT, {"temperature": 5.0}, lambda a, b: not same(a, b)),
    "top_p": (HOT, {"top_p": 0.01}, lambda a, b: not same(a, b)),
    "top_k": (HOT, {"top_k": 1}, lambda a, b: not same(a, b)),
    "min_p": (HOT, {"min_p": 1.0}, lambda a, b: not same(a, b)),
    "repetition_penalty": (GREEDY, {"repetition_penalty": 100.0}, lambda a, b: not same(a, b)),
    "presence_penalty": (
        {**GREEDY, "logit_bias": {"50": 60}, "logprobs": 0},
        {"presence_penalty": 2.0, "logit_bias": {"50": 60, "51": 59}},
        lambda a, b: len(set(tokens(a))) == 1 and len(set(tokens(b))) == 2,
    ),
    "frequency_penalty": (
        {**GREEDY, "logit_bias": {"50": 60, "51": 55}, "logprobs": 0},
        {"frequency_penalty": 2.0},
        lambda a, b: len(set(tokens(a))) == 1 and len(set(tokens(b))) == 2,
    ),
    "logit_bias": (
        {**GREEDY, "logprobs": 0},
        {"logit_bias": {"50": 100}},
        lambda a, b: len(set(tokens(b))) == 1 and tokens(a) != tokens(b),
    ),
    "bad_words": (
        {**GREEDY, "logit_bias": {"50": 60}},
        {"bad_words": ["P"]},  # id 50
        lambda a, b: text(a) == "P" * 16 and "P" not in text(b),
    ),
    "seed": (HOT, {"seed": 6}, lambda a, b: not same(a, b)),
    "n": (HOT, {"n": 3}, lambda a, b: len({one["text"] for one in b["choices"]}) == 3),
    "stop": (
        {**GREEDY, "logit_bias": {"50": 60}},
        {"stop": ["PPP"]},
        lambda a, b: text(b) == "" and b["choices"][0]["stop_reason"] == "PPP",
    ),
    "stop_token_ids": (
        {**GREEDY, "logit_bias": {"50": 60}},
        {"stop_token_ids": [50]},
        lambda a, b: b["choices"][0]["stop_reason"] == 50 and b["usage"]["completion_tokens"] == 1,
    ),
    "ignore_eos": (TO_THE_END, {"ignore_eos": True}, lambda a, b: b["choices"][0]["finish_reason"] == "length"),
    "include_stop_str_in_output": (
        {**GREEDY, "logit_bias": {"50": 60}, "stop": ["PPP"]},
        {"include_stop_str_in_output": True},
        lambda a, b: (text(a), text(b)) == ("", "PPP"),
    ),
    "skip_special_tokens": (
        {**TO_THE_END, "ignore_eos": True},
        {"skip_special_tokens": False},
        lambda a, b: (text(a), text(b)) == ("", "<|im_end|>" * 6),
    ),
    "logprobs": (
        GREEDY,
        {"logprobs": 2},
        lambda a, b: a["choices"][0]["logprobs"] is None and len(b["choices"][0]["logprobs"]["top_logprobs"][0]) == 2,
    ),
    "prompt_logprobs": (  # completions ask for it by echo
        {**GREEDY, "logprobs": 0},
        {"echo": True},
        lambda a, b: len(tokens(b)) == b["usage"]["total_tokens"] and len(tokens(a)) == 16,
    ),
    "response_format": (
        HOT,
        {"response_format": {"type": "choice", "choice": ["yes", "no"]}},
        lambda a, b: text(b) in ("yes", "no"),
    ),
}


def test_no_parameter_is_missing() -> None:
    # What tells thoughts and calls from text is set for chats by their template: tests/openai/test_thinking.py.
    assert set(CASES) | {"thinking", "shown_special_tokens"} == set(SamplingParams.model_fields)


@pytest.mark.parametrize(
    ("library", "ours"),
    [(CompletionParams, CompletionRequest), (ChatParams, ChatRequest), (ResponseParams, ResponsesRequest)],
    ids=["completions", "chat", "responses"],
)
def test_every_field_of_openais_library_is_accepted_or_refused(library: type, ours: type[GenerationRequest]) -> None:
    assert set(library.__annotations__) - set(ours.model_fields) - set(ours.REFUSED) == set()


@pytest.mark.parametrize("name", CASES)
async def test_it_is_not_ignored(client: httpx.AsyncClient, engine: Engine, name: str) -> None:
    assert engine.tokenizer.convert_ids_to_tokens(50) == "P"
    plain, fields, holds = CASES[name]

    async def ask(**body: Any) -> Answer:
        answer = await client.post("/completions", json={"model": "tiny", "prompt": "A request", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    without, with_it = await ask(**plain), await ask(**{**plain, **fields})
    assert holds(without, with_it), (without, with_it)
    assert same(without, await ask(**plain))  # what changed is not chance
