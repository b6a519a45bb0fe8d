"""Short ways to ask a server, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


async def complete(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/completions", json={"model": "tiny", "prompt": "A request", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def choices(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    return (await complete(client, **fields))["choices"]


async def chunks(client: httpx.AsyncClient, path: str = "/completions", **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, which must be one JSON line each and end with `[DONE]`."""
    prompt = {"prompt": "A request"} if path == "/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    answer = await client.post(path, json={"model": "tiny", "stream": True, **prompt, **fields})
    assert answer.status_code == 200, answer.text
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def joined(events: list[dict[str, Any]], index: int = 0) -> str:
    own = [one for event in events for one in event["choices"] if one["index"] == index]
    return "".join(one["text"] if "text" in one else one["delta"].get("content") or "" for one in own)
