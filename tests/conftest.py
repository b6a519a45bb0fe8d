"""Fixtures shared by all tests: tiny models of several architectures, and the demo model that `make model` stored.

Tests never write to the user's BentoML home: the process and the servers that it starts get one of their own, which
sees the demo model through a link.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cb_kernels.cpu import Library, load
from cb_kernels.cpu.build import BuildError, compiler

from tests import skips

DEMO_MODEL = "smollm2-135m-instruct"
_USER_HOME = Path(os.environ.get("BENTOML_HOME") or Path.home() / "bentoml")

# BentoML reads these once, when it is first imported.
_test_home = tempfile.mkdtemp(prefix="cb-bentoml-home-")
atexit.register(shutil.rmtree, _test_home, ignore_errors=True)
os.environ["BENTOML_HOME"] = _test_home
os.environ["BENTOML_DO_NOT_TRACK"] = "True"
# A test that would reach for the network fails at once instead.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What belongs to the engine thread raises when another thread touches it, in servers that tests start too.
os.environ["CB_DEBUG_THREADS"] = "1"
# Tests share their cores with the servers that they start: OpenMP threads that spin while they wait would fight them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(skips, "skips")


def _stored_demo_model() -> Path | None:
    entry = _USER_HOME / "models" / DEMO_MODEL
    try:
        path = entry / (entry / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return path if (path / "model.safetensors").is_file() else None


@pytest.fixture(scope="session")
def bentoml_home() -> Path:
    """The BentoML home of this test run, with the demo model in its store if it was fetched."""
    home = Path(_test_home)
    demo = _stored_demo_model()
    linked = home / "models" / DEMO_MODEL
    if demo is not None and not linked.exists():
        linked.parent.mkdir(parents=True, exist_ok=True)
        linked.symlink_to(demo.parent, target_is_directory=True)
    return home


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """The demo model's directory (bfloat16 Llama, 135M parameters), from the store where `make model` put it."""
    path = _stored_demo_model()
    if path is None:
        message = f"{DEMO_MODEL} is not in {_USER_HOME / 'models'}: run `make model`"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path


@pytest.fixture(scope="session")
def native_kernels() -> Library:
    """The native CPU library. Skips only where nothing could have compiled it; fails where a compiler is here."""
    library = load()
    if library is None:
        try:
            found = compiler()
        except BuildError as error:
            if os.environ.get("CB_REQUIRE_TOOLS") != "1":
                pytest.skip(f"the native CPU kernels are not built: {error}")
            pytest.fail(f"the native CPU kernels are not built: {error}")
        pytest.fail(f"the native CPU kernels are not built, and {found[0]} is here: python -m cb_kernels.cpu.build")
    return library


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_model("qwen3")` is the directory of a tiny float32 model of that architecture, built once per run."""
    from tests.tiny_models import build_model

    built: dict[str, Path] = {}

    def directory(architecture: str) -> Path:
        if architecture not in built:
            built[architecture] = build_model(architecture, tmp_path_factory.mktemp("tiny") / architecture)
        return built[architecture]

    return directory


@pytest.fixture(scope="session")
def tiny_llama(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="session")
def tiny_gpt2(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("gpt2")


@pytest.fixture(scope="session")
def tiny_qwen3(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen3")


@pytest.fixture(scope="session")
def tiny_gemma2(tiny_model: Callable[[str], Path]) -> Path:
    """Sliding window of 24 in every other layer, and soft-capped attention logits."""
    return tiny_model("gemma2")


@pytest.fixture(scope="session")
def tiny_gemma3(tiny_model: Callable[[str], Path]) -> Path:
    """Sliding window of 24 in most layers, and two rotary bases."""
    return tiny_model("gemma3")


@pytest.fixture(scope="session")
def tiny_mistral(tiny_model: Callable[[str], Path]) -> Path:
    """Sliding window of 24 in every layer."""
    return tiny_model("mistral")
