"""What the application does beside answering: routes that it does not have, and headers that stand for fields."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cb_backend import Engine
from cb_backend.client import GenerationOptions


@pytest.mark.parametrize("path", ["/embeddings", "/moderations"])
async def test_a_route_of_openai_that_is_not_served_says_what_is(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(path, json={"model": "tiny", "input": "a"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unsupported_endpoint"
    assert "/v1/completions" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("header", "field", "expected"), [("mail", None, "mail"), ("mail", "code", "code"), (None, None, None)]
)
async def test_the_header_is_the_request_class_where_the_body_has_none(
    client: httpx.AsyncClient,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    header: str | None,
    field: str | None,
    expected: str | None,
) -> None:
    seen: list[Any] = []
    open_ = engine.open

    def spy(prompt: Any, params: Any, options: GenerationOptions, **more: Any) -> Any:
        seen.append(options.request_class)
        return open_(prompt, params, options, **more)

    monkeypatch.setattr(engine, "open", spy)
    body = {"model": "tiny", "prompt": "A", "max_tokens": 1, "request_class": field}
    headers = {} if header is None else {"x-request-class": header}
    answer = await client.post("/completions", json=body, headers=headers)
    assert (answer.status_code, seen) == (200, [expected])
