"""Compressed bodies: read, bounded by what they decode to, or refused by the name of their coding."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from importlib import import_module
from importlib.util import find_spec

import httpx
import pytest

from cb_backend.errors import RequestError
from cb_backend.openai.app import MAX_BODY_BYTES
from cb_backend.openai.body_coding import codings, decoded

BODY = json.dumps({"model": "tiny", "prompt": "Grüße", "max_tokens": 1}).encode()
CODED = {"gzip": gzip.compress(BODY), "x-gzip": gzip.compress(BODY), "deflate": zlib.compress(BODY), "identity": BODY}
if find_spec("brotli"):
    CODED["br"] = import_module("brotli").compress(BODY)
if find_spec("zstandard"):
    CODED["zstd"] = import_module("zstandard").compress(BODY)


async def post(client: httpx.AsyncClient, body: bytes, coding: str) -> httpx.Response:
    headers = {"content-type": "application/json", "content-encoding": coding}
    return await client.post("/completions", content=body, headers=headers)


@pytest.mark.parametrize("coding", CODED)
async def test_a_compressed_body_is_read(client: httpx.AsyncClient, coding: str) -> None:
    answer = await post(client, CODED[coding], coding)
    assert answer.status_code == 200, answer.text


def test_every_coding_that_is_there_is_tested() -> None:
    assert set(codings()) == set(CODED) - {"identity"}


@pytest.mark.parametrize("coding", ["compress", "snappy", "gzip, gzip", "x" * 5000])
async def test_another_coding_is_415_with_its_name(client: httpx.AsyncClient, coding: str) -> None:
    answer = await post(client, BODY, coding)
    assert answer.status_code == 415
    assert coding[:40] in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"no gzip", b"", CODED["gzip"][:-9], CODED["gzip"] + b"more"], ids=str)
async def test_a_body_that_is_not_of_its_coding_is_400(client: httpx.AsyncClient, body: bytes) -> None:
    answer = await post(client, body, "gzip")
    assert answer.status_code == 400
    assert "no whole gzip" in answer.json()["error"]["message"]


async def test_a_small_body_that_is_large_when_decoded_is_413(client: httpx.AsyncClient) -> None:
    answer = await post(client, gzip.compress(b" " * (MAX_BODY_BYTES + 1)), "gzip")
    assert answer.status_code == 413


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_no_more_is_decoded_than_the_limit(coding: str) -> None:
    bomb = (gzip.compress if coding == "gzip" else zlib.compress)(b"x" * 100_000_000)
    tracemalloc.start()
    with pytest.raises(RequestError, match="when decoded"):
        decoded(bomb, coding, 10_000)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
