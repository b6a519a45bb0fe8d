"""The shipped service with an image of its own: no compilers, no CUDA, and a base image that `CB_BASE_IMAGE` names.

    bentoml build -f integration/container/bentofile.yaml .

Serves what integration.service serves; only the packing differs.
"""

from __future__ import annotations

import os

import bentoml

from integration.service import LLM

# For a distribution that it knows, BentoML puts git and a C++ compiler into the image (about 350 MB). The engine needs
# neither: the native CPU kernels come compiled (docs/packaging.md). A name that BentoML does not know keeps them out.
LLM.image = bentoml.images.Image(  # type: ignore[attr-defined]
    base_image=os.environ.get("CB_BASE_IMAGE", "python:3.11-slim"),
    distro="minimal",
    python_version="3.11",
    lock_python_packages=False,
)

__all__ = ["LLM"]
