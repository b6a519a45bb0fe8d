"""LangChain's own suite for chat models, with everything switched on that is about text.

Forced calls and schemas come out right from the demo model because the grammar forces them. What a grammar cannot force
is that a text in them ends, and in a free JSON object, which keys it has: a model of 135M parameters repeats itself for
ever when it is greedy. It is greedy here, so that no test hangs on a seed, with a penalty against repetition. The agent
loop forces nothing: its model is the demo model taught to call (tests/clients/tool_caller.py).
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from langchain_openai import ChatOpenAI, OpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.bento.servers import Server
from tests.clients.conftest import MODEL

# Starting a server is part of the first test, and so is teaching a model.
pytestmark = pytest.mark.timeout(900)

# The penalty counts the prompt too, and what these are to write is in it.
COPIES_FROM_ITS_PROMPT = ("test_agent_loop", "test_unicode_tool_call_integration")

GREEDY: dict[str, Any] = {"model": MODEL, "api_key": "none", "temperature": 0.0, "max_retries": 0}


class TestChatOpenAI(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _what_differs_between_tests(self, request: pytest.FixtureRequest) -> None:
        name = request.node.originalname
        server = request.getfixturevalue("tool_caller_server" if name == "test_agent_loop" else "demo_server")
        self.url = f"{server.url}/v1"
        self.extra_body = {} if name in COPIES_FROM_ITS_PROMPT else {"repetition_penalty": 1.08}

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            **GREEDY,
            "base_url": self.url,
            "extra_body": self.extra_body,
            "max_tokens": 160,
            "stream_usage": True,  # off by default where the address is not OpenAI's
            "http_async_client": httpx.AsyncClient(),  # the shared one would outlive the event loop of one test
        }

    @property
    def model_override_value(self) -> str:
        return MODEL

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True


def test_only_what_is_not_text_is_switched_off() -> None:
    """These flags are why the suite skips seven tests; one that a later version adds is to be looked at."""
    suite = TestChatOpenAI()
    flags = [name for name in dir(suite) if name.startswith(("supports_", "has_", "returns_", "enable_"))]
    off = [name for name in flags if getattr(suite, name) is False]
    assert off == [
        "enable_vcr_tests",  # a benchmark of a recorded stream, without a server
        "supports_anthropic_inputs",
        "supports_audio_inputs",
        "supports_image_inputs",
        "supports_image_tool_message",
        "supports_image_urls",
        "supports_pdf_inputs",
        "supports_pdf_tool_message",
        "supports_video_inputs",
    ]


def test_log_probabilities_of_a_chat(demo_server: Server) -> None:
    model = ChatOpenAI(**GREEDY, base_url=f"{demo_server.url}/v1", max_tokens=5, logprobs=True, top_logprobs=2)
    answer = model.invoke("What is the capital of France?")
    entries = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == answer.content
    for entry in entries:
        assert [len(entry["top_logprobs"]), entry["top_logprobs"][0]["token"]] == [2, entry["token"]]


def test_a_list_of_prompts_is_answered_in_its_order(demo_server: Server) -> None:
    model = OpenAI(**GREEDY, base_url=f"{demo_server.url}/v1", max_tokens=8)
    prompts = ["The capital of France is", "One, two, three,", "The colours of the rainbow are"]
    together = [answer.text for [answer] in model.generate(prompts).generations]
    assert together == [model.invoke(prompt) for prompt in prompts]
    assert "Paris" in together[0]
