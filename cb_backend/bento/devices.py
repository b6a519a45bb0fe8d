"""Which GPUs a legacy runner's processes get: those that the user lets BentoML see, in the user's order.

BentoML's own strategy counts the machine's GPUs, whatever `CUDA_VISIBLE_DEVICES` says, and overwrites the variable: an
empty one, which asks for the CPU, becomes "0".
"""

from __future__ import annotations

import os
from typing import Any

from .compat import DefaultStrategy, get_resource, system_resources

_GPU = "nvidia.com/gpu"
_VARIABLE = "CUDA_VISIBLE_DEVICES"


class VisibleDevices(DefaultStrategy):
    """Worker i gets the i-th visible GPU; none visible means the CPU."""

    @classmethod
    def get_worker_count(cls, runnable_class: Any, resource_request: Any, workers_per_resource: Any) -> int:
        request = _visible(resource_request)
        count: int = super().get_worker_count(runnable_class, request, workers_per_resource)
        return count

    @classmethod
    def get_worker_env(
        cls, runnable_class: Any, resource_request: Any, workers_per_resource: Any, worker_index: int
    ) -> dict[str, Any]:
        request = _visible(resource_request)
        environ: dict[str, Any] = super().get_worker_env(runnable_class, request, workers_per_resource, worker_index)
        names = _names()
        if names and request[_GPU]:
            chosen = [names[int(index)] for index in environ[_VARIABLE].split(",")]
            environ[_VARIABLE] = ",".join(chosen)
        return environ


def _visible(resource_request: Any) -> dict[str, Any]:
    """The request, with no more GPUs than are visible; they are numbered as the process sees them."""
    request = dict(system_resources() if resource_request is None else resource_request)
    gpus = get_resource(request, _GPU) or []
    names = _names()
    request[_GPU] = gpus if names is None else list(range(min(len(gpus), len(names))))
    return request


def _names() -> list[str] | None:
    """What the variable names, as CUDA reads it: up to the first name that is none. None: it is not set."""
    value = os.environ.get(_VARIABLE)
    if value is None:
        return None
    names: list[str] = []
    for name in (part.strip() for part in value.split(",")):
        if not name or name == "-1":
            break
        names.append(name)
    return names
