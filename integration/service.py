"""The service that `make serve` and the Bento run: OpenAI's API and BentoML's own endpoints over one engine.

    bentoml serve integration.service:LLM

Copy it, and change what the comments name. `CB_MODEL` serves another model without a change, and every other field of
the engine's configuration has its variable too (README.md).
"""

from __future__ import annotations

import bentoml

import cb_backend


# The timeline of the batch at /cb/timeline, if CB_TIMELINE=1 (docs/operations.md).
@cb_backend.timeline
# The OpenAI routes: /v1/models, /v1/completions, /v1/chat/completions. Any OpenAI client works, with any API key.
@bentoml.asgi_app(cb_backend.openai_app(), path="/v1")
@bentoml.service(
    name="llm",
    # One worker holds the model and the KV pool; more copies of it are more replicas, not more workers.
    workers=1,
    # Seconds until the first byte of an answer: a request may wait in the queue for that long. Streams may last longer.
    # There is no `max_concurrency` here: the engine queues, and refuses with 429 when its own queue is full.
    traffic={"timeout": 300},
    # On a GPU: resources={"gpu": 1},
)
class LLM(cb_backend.ContinuousBatching):
    # A tag of the model store, a directory or a Hugging Face id. `bentoml.models.BentoModel(...)` also packs the model
    # into a Bento by itself; here bentofile.yaml does that, so that CB_MODEL needs nothing in the store.
    model = "smollm2-135m-instruct:latest"
    # Any field of cb_backend.EngineConfig, for example {"max_num_seqs": 64, "kv_cache_memory": "2GiB"}.
    engine_config = {}
