"""Two engines for all cases: one with room, one whose end ids come from several files and whose memory is scarce."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cb_backend import Engine
from cb_backend.openai.app import openai_app

CONTEXT = 256
SCARCE_TOKENS = 160
_COMMON: dict[str, Any] = {
    "served_model_name": "tiny",
    "dtype": "float32",
    "device": "cpu",
    "block_size": 16,
    "swap_space": 0,
    "num_threads": 1,
}


@asynccontextmanager
async def connected(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(openai_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@pytest.fixture(scope="package")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    with Engine(model=str(tiny_llama), num_kv_blocks=160, max_model_len=CONTEXT, **_COMMON) as engine:
        yield engine


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    async with connected(engine) as client:
        yield client


@pytest.fixture(scope="package")
def scarce_engine(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Its tokenizer and config end with 2; its generation config also ends with 7."""
    directory = tmp_path_factory.mktemp("cases") / "model"
    shutil.copytree(tiny_llama, directory)
    path = directory / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**settings, "eos_token_id": [2, 7]}), encoding="utf-8")
    with Engine(model=str(directory), num_kv_blocks=SCARCE_TOKENS // 16, **_COMMON) as engine:
        yield engine


@pytest.fixture
async def scarce(scarce_engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    async with connected(scarce_engine) as client:
        yield client
