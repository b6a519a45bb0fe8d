"""The shipped service under `bentoml serve`, for other people's clients and suites (`make clients` installs them).

Where one is missing its tests are left out with a warning, or fail with `CB_REQUIRE_CLIENTS=1`. Schemathesis is small
and one of the tools that all tests have.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bento.servers import Server, serving

MODEL = "demo"
TINY = "tiny"
DEMO_CONFIG = {"served_model_name": MODEL, "num_threads": 2, "num_kv_blocks": 1024, "block_size": 16}
_NEEDED = {
    "test_langchain.py": ("langchain_openai", "langchain_tests"),
    "test_lm_eval.py": ("lm_eval",),
    "test_openai_and_litellm.py": ("litellm",),
}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    missing = [name for name in _NEEDED.get(collection_path.name, ()) if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    message = f"{collection_path.name} needs {', '.join(missing)}: run `make clients`"
    if os.environ.get("CB_REQUIRE_CLIENTS") == "1":
        raise pytest.UsageError(message)
    warnings.warn(message, stacklevel=1)
    return True


@pytest.fixture(scope="session")
def demo_server(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model in float32: what it says must not depend on the processor."""
    folder = tmp_path_factory.mktemp("demo")
    with serving("integration.service:LLM", folder, demo_model_path, **DEMO_CONFIG) as server:
        yield server


@pytest.fixture(scope="session")
def tool_caller_server(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model after it was taught to call tools by itself, under the demo model's name."""
    from tests.clients.tool_caller import teach

    folder = tmp_path_factory.mktemp("tool-caller")
    taught = folder / "model"
    teach(demo_model_path, taught)
    try:
        with serving("integration.service:LLM", folder, taught, **DEMO_CONFIG) as server:
            yield server
    finally:
        shutil.rmtree(taught)  # half a gigabyte, which pytest would keep for three runs


@pytest.fixture(scope="session")
def tiny_server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tiny-server")
    with serving("integration.service:LLM", folder, tiny_llama, num_kv_blocks=512, block_size=16) as server:
        yield server
