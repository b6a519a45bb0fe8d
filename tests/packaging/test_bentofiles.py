"""The Bentos of the images are the shipped one: with a CPU build of torch, or with every package of a CUDA build."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_cpu_image_differs_in_its_torch_its_service_and_its_image_only() -> None:
    shipped, image = read("bentofile.yaml"), read("integration/container/bentofile.yaml")
    assert [pin for pin in image["python"]["packages"] if "+" in pin] == ["torch==2.13.0+cpu"]
    image["python"]["packages"] = [pin.removesuffix("+cpu") for pin in image["python"]["packages"]]
    image["include"].remove("/integration/container/*.py")
    image["service"] = image["service"].replace("integration.container.", "integration.")
    del shipped["docker"]  # integration/container/service.py says it
    assert image == shipped


def test_the_cuda_image_differs_in_its_packages_its_service_and_its_image_only() -> None:
    shipped, image = read("bentofile.yaml"), read("integration/container/cuda-bentofile.yaml")
    lines = (ROOT / image["python"].pop("requirements_txt")).read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9.-]+==[\w.]+", pin)] == []
    assert set(shipped["python"].pop("packages")) <= set(pins)
    assert {"triton", "nvidia-cublas", "cuda-toolkit"} <= {pin.partition("==")[0] for pin in pins}
    image["envs"].remove({"name": "TRITON_CACHE_DIR", "value": "/tmp/triton"})
    image["include"].remove("/integration/container/*.py")
    image["service"] = image["service"].replace("integration.container.cuda_", "integration.")
    del shipped["docker"]  # integration/container/cuda_service.py says it
    assert image == shipped


@pytest.mark.parametrize(
    "name",
    ["bentofile.yaml", "integration/container/bentofile.yaml", "integration/container/cuda-bentofile.yaml"],
)
def test_a_bento_is_found_as_an_openai_endpoint_and_takes_along_what_make_install_compiled(name: str) -> None:
    bento = read(name)
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in bento["envs"]
    assert bento["labels"] == {"openai_endpoint": "/v1"}
    assert "/kernels/**" in bento["include"]
    assert not [pattern for pattern in bento["exclude"] if pattern.endswith(".so")]
    assert bento["python"]["lock_packages"] is False
