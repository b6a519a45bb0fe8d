"""One tiny engine for all tests of the HTTP shapes, and a client that talks to its application without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from cb_backend import Engine
from cb_backend.openai.app import openai_app

MODEL = "tiny"
MAX_MODEL_LEN = 256


@pytest.fixture(scope="package")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    with Engine(
        model=str(tiny_llama),
        served_model_name=MODEL,
        dtype="float32",
        device="cpu",
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=40,
        block_size=16,
        swap_space=0,
        num_threads=1,
    ) as engine:
        yield engine


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(openai_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
