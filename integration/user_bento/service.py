"""A service in a folder of its own, that depends on the installed package: `bentoml serve .`, `bentoml build`."""

from __future__ import annotations

import bentoml

import cb_backend


@bentoml.asgi_app(cb_backend.openai_app(), path="/v1")
@bentoml.service(name="assistant", labels={"openai_endpoint": "/v1"}, workers=1, traffic={"timeout": 300})
class Assistant(cb_backend.ContinuousBatching):
    model = bentoml.models.BentoModel("smollm2-135m-instruct:latest")
    engine_config = {"max_num_seqs": 64}
