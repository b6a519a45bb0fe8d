"""Schemas that were made to cost time: each is answered, and the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import httpx
import pytest

HI = [{"role": "user", "content": "Hi"}]
LONG = "(?i)" + "[\\x00-\\uffff]" * 500
ENUMS = {
    "type": "object",
    "$defs": {"a": {"enum": list(range(3000))}, "b": {"enum": list(range(3000, 6000))}},
    "properties": {f"p{i}": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]} for i in range(40)},
}


def text(pattern: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        (text(LONG), "'prompt': the prompt has"),
        (text("a" * 4_000_000), "'tools': together larger than 262144 bytes"),
        (ENUMS, "'prompt': the prompt has"),
    ],
    ids=["7 KB", "4 MB", "enums"],
)
async def test_it_is_answered_and_holds_nothing(
    client: httpx.AsyncClient, schema: dict[str, Any], refused: str, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_pattern = re.compile

    def watched(pattern: Any, *flags: Any) -> Any:
        assert not (isinstance(pattern, str) and len(pattern) > 3000)
        return compile_pattern(pattern, *flags)

    monkeypatch.setattr(re, "compile", watched)
    longest, ended = 0.0, asyncio.Event()

    async def tick() -> None:
        nonlocal longest
        while not ended.is_set():
            began = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - began)

    ticking = asyncio.ensure_future(tick())
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    body = {"model": "tiny", "messages": HI, "tools": tools, "tool_choice": choice, "max_tokens": 1}
    answer = await client.post("/chat/completions", json=body)
    ended.set()
    await ticking
    # The prompt with the tools may be more than the tiny model's context: that is told after all else.
    assert answer.status_code == 200 or answer.json()["error"]["message"].startswith(refused), answer.text
    assert longest < 5.0  # seconds; it was 10 to 94
