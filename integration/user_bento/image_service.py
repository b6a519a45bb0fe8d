"""The same by `bentoml.images.Image` instead of a bentofile: `bentoml build image_service:Assistant`."""

from __future__ import annotations

import bentoml

import cb_backend

image = bentoml.images.Image(python_version="3.11", lock_python_packages=False).python_packages(
    "cb-backend[bento]==0.1.0"
)


@bentoml.asgi_app(cb_backend.openai_app(), path="/v1")
@bentoml.service(name="assistant", image=image, labels={"openai_endpoint": "/v1"}, workers=1, traffic={"timeout": 300})
class Assistant(cb_backend.ContinuousBatching):
    model = bentoml.models.BentoModel("smollm2-135m-instruct:latest")
    engine_config = {"max_num_seqs": 64}
