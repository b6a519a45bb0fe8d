"""The shipped service with an image for NVIDIA GPUs.

    bentoml build -f integration/container/cuda-bentofile.yaml .

torch brings CUDA's libraries and the host its driver, so the base image has no CUDA: set `CB_BASE_IMAGE` to one only
for code of your own that needs it. The C compiler that BentoML puts into the image stays: Triton needs it at run time.
"""

from __future__ import annotations

import os

import bentoml

from integration.service import LLM

LLM.image = bentoml.images.Image(  # type: ignore[attr-defined]
    base_image=os.environ.get("CB_BASE_IMAGE", "python:3.11-slim"),
    python_version="3.11",
    lock_python_packages=False,
)

# On a machine without a GPU it says so, instead of serving slowly. `CB_DEVICE=cpu` serves there all the same.
LLM.inner.engine_config = {"device": "cuda"}  # type: ignore[attr-defined]

__all__ = ["LLM"]
