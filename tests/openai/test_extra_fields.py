"""The table of extra fields in docs/openai.md, row by row and route by route."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "openai.md").read_text(encoding="utf-8")
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chats": ("/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
    "completions": ("/completions", {"prompt": "Hi", "max_tokens": 1}),
    "responses": ("/responses", {"input": "Hi", "max_output_tokens": 1}),
}
ROWS = [
    (field, json.loads(value), route, wanted)
    for field, value, *answers in re.findall(
        r"^\| `(\w+)` \| `(.+?)` \| (\w+) \| (\w+) \| (\w+) \|$", PAGE, re.MULTILINE
    )
    for route, wanted in zip(ROUTES, answers, strict=True)
]


def test_the_table_is_found() -> None:
    assert len(ROWS) >= 36


@pytest.mark.parametrize(("field", "value", "route", "wanted"), ROWS, ids=str)
async def test_a_field_is_accepted_or_refused_as_told(
    client: httpx.AsyncClient, field: str, value: Any, route: str, wanted: str
) -> None:
    path, body = ROUTES[route]
    answer = await client.post(path, json={"model": "tiny", **body, field: value})
    assert answer.status_code == {"accepted": 200, "refused": 400}[wanted], answer.text
    if wanted == "refused":
        assert answer.json()["error"]["param"] == field
