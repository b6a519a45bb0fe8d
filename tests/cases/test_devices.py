"""Reports of GPUs that a worker got though its user had not offered them, on machines with GPUs that are made up."""

from __future__ import annotations

from typing import Any

import pytest
from _bentoml_impl.server import allocator
from bentoml._internal.resource import CpuResource, NvidiaGpuResource

import cb_backend
from cb_backend.bento import devices


def made_up(monkeypatch: pytest.MonkeyPatch, gpus: int, visible: str | None) -> None:
    resources = {"cpu": 4.0, "nvidia.com/gpu": list(range(gpus))}
    monkeypatch.setattr(allocator, "system_resources", lambda: resources)
    monkeypatch.setattr(devices, "system_resources", lambda: resources)
    monkeypatch.setattr(CpuResource, "from_system", classmethod(lambda kind: resources["cpu"]))
    monkeypatch.setattr(NvidiaGpuResource, "from_system", classmethod(lambda kind: list(range(gpus))))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def of_services(count: int) -> list[Any]:
    """CUDA_VISIBLE_DEVICES in the workers of `count` services of one GPU each; None: as the user set it."""
    services = [cb_backend.llm_service("m", name=f"llm{i}", resources={"gpu": 1}) for i in range(count)]
    allocation = allocator.ResourceAllocator()
    config = {service.name: service.config for service in services}
    environs = [allocation.get_worker_env(service, services=config)[1] for service in services]
    return [environ.get("CUDA_VISIBLE_DEVICES") for environ in environs]


def of_runner() -> list[Any]:
    environs = cb_backend.to_runner("m").scheduled_worker_env_map
    return [environs[i]["CUDA_VISIBLE_DEVICES"] for i in sorted(environs)]


@pytest.mark.parametrize("visible", ["", "-1"])
def test_case_178_who_asks_for_the_cpu_gets_it(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    made_up(monkeypatch, 2, visible)
    assert of_services(1) == [None]
    assert of_runner() == ["-1"]


@pytest.mark.parametrize(
    ("gpus", "visible", "services", "runner"),
    [
        (1, None, ["0"], ["0"]),
        (2, None, ["0", "1"], ["0", "1"]),
        (4, "3,1", [None], ["3", "1"]),
        (4, "GPU-6a2f, GPU-11bc", [None], ["GPU-6a2f", "GPU-11bc"]),
        (4, "2,-1,3", [None], ["2"]),
        (1, "0,1", [None], ["0"]),
    ],
)
def test_case_179_a_worker_gets_the_visible_gpu_of_its_number(
    monkeypatch: pytest.MonkeyPatch, gpus: int, visible: str | None, services: list[Any], runner: list[str]
) -> None:
    made_up(monkeypatch, gpus, visible)
    assert of_services(len(services)) == services
    assert of_runner() == runner
