"""The official openai client and litellm: chat, streams, tools, schemas, log-probabilities, lists of prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import litellm
import openai
import pytest
from pydantic import BaseModel

from tests.bento.servers import Server
from tests.clients.conftest import MODEL

pytestmark = pytest.mark.timeout(120)

Call = Callable[..., Any]

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Lyon"]}, "people": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up a city.", "parameters": CITY}}
WEATHER_MESSAGES = [{"role": "user", "content": "What is the weather in San Francisco, CA?"}]
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather at a location.",
        "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
    },
}
GREEDY = {"temperature": 0.0, "max_tokens": 24}


@pytest.fixture(scope="module")
def client(demo_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(params=["openai", "litellm"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def chat(name: str, demo_server: Server) -> Call:
    return chat_of(name, demo_server)


@pytest.fixture
def free_chat(name: str, tool_caller_server: Server) -> Call:
    """With the model that calls tools by itself."""
    return chat_of(name, tool_caller_server)


def chat_of(name: str, server: Server) -> Call:
    """The same call through either client; both answer with objects of one shape."""
    address = {"base_url": f"{server.url}/v1", "api_key": "none"}
    if name == "openai":
        client = openai.OpenAI(**address, max_retries=0, timeout=60)
        return lambda **fields: client.chat.completions.create(model=MODEL, **{**GREEDY, **fields})
    return lambda **fields: litellm.completion(f"openai/{MODEL}", **address, num_retries=0, **{**GREEDY, **fields})


def test_a_chat_and_its_stream_say_the_same(chat: Call) -> None:
    whole = chat(messages=MESSAGES)
    assert "Paris" in whole.choices[0].message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    text, reasons, usage = "", [], None
    for chunk in chat(messages=MESSAGES, stream=True, stream_options={"include_usage": True}):
        usage = getattr(chunk, "usage", None) or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert reasons[-1] == whole.choices[0].finish_reason
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
def test_a_forced_call_fits_its_parameters(chat: Call, choice: Any) -> None:
    answer = chat(messages=MESSAGES, tools=[TOOL], tool_choice=choice, max_tokens=60).choices[0]
    assert answer.finish_reason == "tool_calls"
    [call] = answer.message.tool_calls
    assert call.function.name == "look_up"
    jsonschema.validate(json.loads(call.function.arguments), CITY)


def test_a_streamed_call_is_the_whole_one(chat: Call) -> None:
    options = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
    [whole] = chat(**options).choices[0].message.tool_calls
    assert streamed_call(chat(**options, stream=True)) == ("look_up", whole.function.arguments)


def streamed_call(chunks: Any) -> tuple[str, str]:
    """The name and the arguments of the one call that comes."""
    name, arguments = "", ""
    for chunk in chunks:
        for choice in chunk.choices:
            assert not choice.delta.content
            for piece in choice.delta.tool_calls or ():
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
    return name, arguments


@pytest.mark.timeout(900)
def test_a_call_that_nothing_forced_is_read_out_of_the_text(free_chat: Call) -> None:
    options = {"messages": WEATHER_MESSAGES, "tools": [WEATHER_TOOL], "max_tokens": 60}
    answer = free_chat(**options).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    [call] = answer.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"location": "San Francisco, CA"}
    assert streamed_call(free_chat(**options, stream=True)) == ("get_weather", call.function.arguments)


@pytest.mark.timeout(900)
def test_what_a_tool_said_is_answered_in_words(free_chat: Call) -> None:
    called = free_chat(messages=WEATHER_MESSAGES, tools=[WEATHER_TOOL], max_tokens=60).choices[0].message
    said = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "It's sunny."}
    heard = [*WEATHER_MESSAGES, called.model_dump(exclude_none=True), said]
    answer = free_chat(messages=heard, tools=[WEATHER_TOOL]).choices[0]
    assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
    assert "sunny" in answer.message.content


@pytest.mark.timeout(900)
def test_tools_that_are_of_no_use_are_left_alone(free_chat: Call) -> None:
    greeting = [{"role": "user", "content": "Hi, good morning!"}]
    answer = free_chat(messages=greeting, tools=[WEATHER_TOOL]).choices[0]
    assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
    assert answer.message.content


def test_an_answer_fits_its_json_schema(chat: Call) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answer = chat(messages=MESSAGES, response_format=wanted, max_tokens=60).choices[0]
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.message.content), CITY)


def test_log_probabilities_of_a_chat(chat: Call) -> None:
    answer = chat(messages=MESSAGES, logprobs=True, top_logprobs=3, max_tokens=5).choices[0]
    entries = answer.logprobs.content
    assert "".join(entry.token for entry in entries) == answer.message.content
    for entry in entries:  # greedy: the chosen token is the likeliest
        assert [len(entry.top_logprobs), entry.top_logprobs[0].token] == [3, entry.token]
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0.0


class City(BaseModel):
    name: str
    is_capital: bool


def test_the_openai_client_parses_into_its_own_models(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=City, temperature=0.0, max_tokens=60
    )
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, City)
    assert parsed.name


def test_the_openai_client_reads_a_response_and_its_events(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "input": "What is the capital of France?", "temperature": 0.0, "max_output_tokens": 24}
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "Paris" in whole.output_text
    assert "".join(deltas) == final.output_text == whole.output_text


def test_a_list_of_prompts_is_answered_in_its_order(client: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "One, two, three,", "The colours of the rainbow are"]
    options = {"model": MODEL, "temperature": 0.0, "max_tokens": 8}
    together = client.completions.create(prompt=prompts, **options)
    alone = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in prompts]
    assert [choice.text for choice in together.choices] == alone
    through_litellm = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt=prompts,
        api_base=str(client.base_url),
        api_key="none",
        temperature=0.0,
        max_tokens=8,
    )
    assert [choice.text for choice in through_litellm.choices] == alone


def test_a_completion_is_scored_with_its_prompt(client: openai.OpenAI) -> None:
    prompt = "The capital of France is Paris"
    choice = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=1, temperature=0.0
    ).choices[0]
    assert choice.text == prompt
    assert "".join(choice.logprobs.tokens) == prompt
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0.0 for value in choice.logprobs.token_logprobs[1:])


def test_both_clients_raise_their_own_error_for_a_field_that_is_refused(chat: Call) -> None:
    with pytest.raises((openai.BadRequestError, litellm.BadRequestError), match="top_p"):
        chat(messages=MESSAGES, top_p=7.0)
