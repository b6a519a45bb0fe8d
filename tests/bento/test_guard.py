"""The outermost layer: what is refused on every route before anything reads it, and what passes."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from cb_backend.bento.guard import Guard, GuardSettings, SettingsError, Turnstile


async def echo(request: Request) -> Response:
    return PlainTextResponse(f"{len(await request.body())}")


def client(**environ: str) -> httpx.AsyncClient:
    app = Starlette(routes=[Route("/{rest:path}", echo, methods=["GET", "POST"])])
    guard = Guard(app, GuardSettings.from_environment(environ))
    return httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://server:3000")


async def raw(headers: list[tuple[bytes, bytes]], path: str = "/generate", **scope: Any) -> int:
    """The status of a request that no well-behaved client sends."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("served")(scope, receive, send)

    whole = {"type": "http", "method": "GET", "path": path, "headers": headers, "http_version": "1.1", **scope}
    await Guard(app, GuardSettings())(whole, receive, send)
    status: int = sent[0]["status"]
    return status


async def test_one_host_is_needed() -> None:
    assert await raw([(b"host", b"a")]) == 200
    assert await raw([]) == 400
    assert await raw([(b"host", b"")]) == 400
    assert await raw([(b"host", b"a"), (b"host", b"b")]) == 400
    assert await raw([], http_version="1.0") == 200  # it has no such header


@pytest.mark.parametrize("character", ["\n", "\r", "\x00", "\x1b", "\x7f", "\x85", "\u2028", "\u2029"])
async def test_a_path_with_a_control_character_is_refused_and_reaches_no_log(character: str) -> None:
    scope: dict[str, Any] = {"path": f"/x{character}forged line"}
    assert await raw([(b"host", b"a")], **scope) == 400


async def test_paths_in_any_script_pass() -> None:
    assert await raw([(b"host", b"a")], path="/v1/models/größe-模型") == 200


async def test_pages_of_other_origins_are_refused_unless_allowed() -> None:
    async with client() as one:
        assert (await one.get("/a", headers={"Origin": "http://server:3000"})).status_code == 200
        refused = await one.get("/a", headers={"Origin": "http://evil.example"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert (await one.get("/a", headers={"Origin": "null"})).status_code == 403
    async with client(CB_ALLOWED_ORIGINS="http://app.example, http://other.example/") as one:
        allowed = await one.get("/a", headers={"Origin": "http://app.example"})
        assert allowed.headers["access-control-allow-origin"] == "http://app.example"
        preflight = await one.options(
            "/a", headers={"Origin": "http://other.example", "Access-Control-Request-Method": "POST"}
        )
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == "http://other.example"
        assert (await one.get("/a", headers={"Origin": "http://evil.example"})).status_code == 403


async def test_keys_are_asked_for_where_they_are_set(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("second\n\n  third \n")
    async with client(CB_API_KEYS="first", CB_API_KEYS_FILE=str(file)) as one:
        missing = await one.post("/generate")
        assert (missing.status_code, missing.json()["error"]["code"]) == (401, "invalid_api_key")
        assert missing.headers["www-authenticate"] == "Bearer"
        for key in ("first", "second", "third"):
            assert (await one.post("/a", headers={"Authorization": f"Bearer {key}"})).status_code == 200
        assert (await one.post("/a", headers={"x-api-key": "second"})).status_code == 200
        assert (await one.post("/a", headers={"Authorization": "Bearer fourth"})).status_code == 401
        assert (await one.post("/a", headers={"Authorization": "Basic first"})).status_code == 401
        for path in ("/livez", "/readyz", "/healthz", "/metrics"):
            assert (await one.get(path)).status_code == 200
    async with client() as one:
        assert (await one.post("/a")).status_code == 200


@pytest.mark.parametrize(
    "environ",
    [
        {"CB_API_KEYS": " , "},
        {"CB_API_KEYS_FILE": "/nowhere/keys"},
        {"CB_MAX_BODY_BYTES": "0"},
        {"CB_MAX_BODY_BYTES": "many"},
    ],
)
def test_a_wrong_setting_is_said_by_name(environ: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=next(iter(environ))):
        GuardSettings.from_environment(environ)


async def test_a_body_above_the_limit_is_413_and_not_read_on() -> None:
    async def pieces(count: int) -> Any:
        for _ in range(count):
            yield b"x" * 10
            await asyncio.sleep(0)

    async with client(CB_MAX_BODY_BYTES="100") as one:
        assert (await one.post("/generate", content=b"x" * 100)).text == "100"
        assert (await one.post("/generate", content=b"x" * 101)).status_code == 413
        assert (await one.post("/generate", content=pieces(10))).text == "100"
        refused = await one.post("/generate", content=pieces(1000))  # no length is declared
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")


async def test_a_burst_begins_over_many_turns_of_the_loop() -> None:
    turnstile, turn = Turnstile(per_turn=4), 0
    began: list[tuple[int, int]] = []  # (turn, number)

    async def request(number: int) -> None:
        await turnstile.enter()
        began.append((turn, number))

    tasks = [asyncio.ensure_future(request(number)) for number in range(40)]
    tasks[7].cancel()  # before it waits
    while not all(task.done() for task in tasks):
        turn += 1
        await asyncio.sleep(0)
    assert [number for _, number in began] == [number for number in range(40) if number != 7]  # in order
    assert max(Counter(turn for turn, _ in began).values()) <= 4
    await turnstile.enter()  # nothing is left of the burst


async def test_one_that_leaves_while_it_waits_takes_no_turn() -> None:
    turnstile = Turnstile(per_turn=1)
    await turnstile.enter()
    first, second = (asyncio.ensure_future(turnstile.enter()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(second, 1)
