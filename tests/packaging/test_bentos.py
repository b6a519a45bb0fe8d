"""Bentos are built and served without a network: the shipped one, and a user's own in both of BentoML's ways."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import cb_backend
from cb_backend.bento.preflight import check_models
from tests.bento.servers import serving

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m-instruct"
PACKAGE = f"cb-backend[bento]=={cb_backend.__version__}"


def run(home: Path, *command: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "BENTOML_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "UV_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )


@pytest.fixture(scope="module")
def home(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BentoML home whose model store holds a tiny model under the demo model's name."""
    home = tmp_path_factory.mktemp("home")
    stored = run(home, "cb_backend.bento.models", "import", str(tiny_llama), "--name", MODEL)
    assert stored.returncode == 0, stored.stderr
    return home


def build(home: Path, *arguments: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The built Bento's folder and its bento.yaml."""
    built = run(home, "bentoml", "build", "-o", "tag", *arguments, folder=folder)
    assert built.returncode == 0, built.stdout + built.stderr
    tag = built.stdout.strip().splitlines()[-1].removeprefix("__tag__:")
    bento = home / "bentos" / tag.replace(":", "/")
    return bento, yaml.safe_load((bento / "bento.yaml").read_text(encoding="utf-8"))


def models(about: dict[str, Any]) -> list[str]:
    """Names of the models that a Bento takes along: of bentofile.yaml, and of its services' `BentoModel`s."""
    listed = about["models"] + [model for service in about["services"] for model in service["models"]]
    return [model["tag"].partition(":")[0] for model in listed]


@pytest.fixture(scope="module")
def shipped(home: Path) -> tuple[Path, dict[str, Any]]:
    return build(home, folder=ROOT)


def test_the_shipped_bento_holds_its_sources_and_nothing_of_the_workshop(shipped: tuple[Path, dict[str, Any]]) -> None:
    bento, about = shipped
    assert {path.name for path in (bento / "src").iterdir()} == {
        *("LICENSE", "bentofile.yaml", "cb_backend", "integration", "kernels"),
    }
    assert (bento / "src" / "kernels" / "cb_kernels" / "cpu" / "src" / "dispatch.cpp").is_file()
    compiled = ROOT / "kernels" / "cb_kernels" / "cpu" / "libcb_cpu.so"
    assert (bento / "src" / compiled.relative_to(ROOT)).is_file() == compiled.is_file()
    assert not list(bento.rglob("__pycache__"))
    assert about["labels"] == {"openai_endpoint": "/v1"}
    assert models(about) == [MODEL]


def test_the_shipped_bento_serves_its_own_sources(
    shipped: tuple[Path, dict[str, Any]], home: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "home").symlink_to(home)  # where `serving` looks for the models
    with serving(str(shipped[0]), tmp_path, tiny_llama, num_kv_blocks=16) as server:
        answer = server.post("/v1/completions", model="tiny", prompt=[1, 2, 3], max_tokens=4, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 4


def test_the_cuda_bento_on_a_machine_without_a_gpu_says_so_in_one_line(
    home: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bento, _ = build(home, "-f", "integration/container/cuda-bentofile.yaml", ".", folder=ROOT)
    (tmp_path / "home").symlink_to(home)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with serving(str(bento), tmp_path, tiny_llama, wait=False) as server:
        server.until(lambda: server.status("/livez") == 503, "not alive")
        errors = [line for line in server.log.read_text().splitlines() if "[ERROR]" in line]
    assert len(errors) == 1
    assert re.search(r"the model could not be loaded: device 'cuda': torch .*, or set device to 'cpu'$", errors[0])


@pytest.mark.parametrize("arguments", [(), ("image_service:Assistant",)], ids=["bentofile", "Image"])
def test_a_service_in_its_own_folder_needs_the_package_only(
    home: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(ROOT / "integration" / "user_bento", folder, ignore=shutil.ignore_patterns("__pycache__"))
    if arguments:
        (folder / "bentofile.yaml").unlink()
    bento, about = build(home, *arguments, folder=folder)
    requirements = (bento / "env" / "python" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert requirements[0] == PACKAGE
    assert not (bento / "src" / "cb_backend").exists()
    assert models(about) == [MODEL]


def test_a_bento_whose_model_is_missing_ends_with_one_line_that_says_how_to_bring_it(
    shipped: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    bento, about = shipped
    [tag] = [model["tag"] for model in about["models"]]
    served = run(tmp_path, "cb_backend.bento.serve", str(bento), "--port", "0")
    assert served.returncode == 1
    assert served.stderr.strip().splitlines() == [
        f"error: model {tag} of this Bento is not in {tmp_path / 'models'}: run `bentoml models export {tag} FILE` "
        "where the Bento was built and `bentoml models import FILE` here"
    ]
    # BentoML itself names the model too.
    served = run(tmp_path, "bentoml", "serve", str(bento), "--port", "0")
    assert served.returncode == 1
    assert served.stderr.strip().splitlines()[-1].startswith(f"Error: [serve] `serve` failed: Model {tag} could not be")


def test_a_model_moves_to_another_store_as_that_line_says(
    shipped: tuple[Path, dict[str, Any]], home: Path, tmp_path: Path
) -> None:
    [tag] = [model["tag"] for model in shipped[1]["models"]]
    file = tmp_path / "model.bentomodel"
    assert run(home, "bentoml", "models", "export", tag, str(file)).returncode == 0
    assert run(tmp_path / "other", "bentoml", "models", "import", str(file)).returncode == 0
    check_models(str(shipped[0]), tmp_path / "other")


def test_a_store_that_cannot_be_written_is_named_with_what_to_do(tiny_llama: Path) -> None:
    stored = run(Path("/dev/null/home"), "cb_backend.bento.models", "import", str(tiny_llama), "--name", MODEL)
    assert stored.returncode == 1
    [line] = stored.stderr.strip().splitlines()
    assert line == "error: /dev/null/home: Not a directory; set BENTOML_HOME to a directory that you can write to"
