"""Services whose limits are BentoML's: seconds, requests at once, workers. The engine is CB_MODEL's."""

from __future__ import annotations

import bentoml

import cb_backend


@bentoml.asgi_app(cb_backend.openai_app(), path="/v1")
@bentoml.service(name="limited", traffic={"timeout": 1, "max_concurrency": 2})
class Limited(cb_backend.ContinuousBatching):
    model = "from CB_MODEL"


@bentoml.asgi_app(cb_backend.openai_app(), path="/v1")
@bentoml.service(name="twins", workers=2)
class Twins(cb_backend.ContinuousBatching):
    model = "from CB_MODEL"
