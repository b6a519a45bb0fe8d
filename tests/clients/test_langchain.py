"""LangChain's own suite for chat models, with tools and JSON switched on, against the demo model.

Forced calls and schemas come out right because the grammar forces them. What a grammar cannot force is that a text in
them ends, and in a free JSON object, which keys it has: a model of 135M parameters repeats itself for ever when it is
greedy. It is greedy here, so that no test hangs on a seed, with a penalty against repetition.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.bento.servers import Server
from tests.clients.conftest import MODEL

pytestmark = pytest.mark.timeout(120)


class TestChatOpenAI(ChatModelIntegrationTests):
    url: str

    @pytest.fixture(autouse=True, scope="class")
    def _address(self, request: pytest.FixtureRequest, demo_server: Server) -> None:
        request.cls.url = f"{demo_server.url}/v1"

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "base_url": self.url,
            "api_key": "none",
            "temperature": 0.0,
            "extra_body": {"repetition_penalty": 1.08},
            "max_tokens": 160,
            "max_retries": 0,
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

    def test_unicode_tool_call_integration(self, model: Any) -> None:
        """Without the penalty, which counts the prompt too: the names are to be copied out of it."""
        super().test_unicode_tool_call_integration(model.model_copy(update={"extra_body": {}}))

    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    @pytest.mark.xfail(strict=True, reason="nothing forces the call: the demo model was not trained to decide for one")
    def test_agent_loop(self, model: Any) -> None:
        super().test_agent_loop(model)
