"""A BentoVLLM project's service.py, after: the class, its arguments, its label and its OpenAI routes stay.

bentoml serve integration.migrate.bentovllm_service:LLM
bentoml build --arg model=org/name --arg max_model_len=4096
"""

from __future__ import annotations

import bentoml
import pydantic

import cb_backend


class BentoArgs(pydantic.BaseModel):
    model: str = "smollm2-135m-instruct:latest"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    gpu: int = 0


bento_args = bentoml.use_arguments(BentoArgs)


# Was `__command__`, which started `vllm serve` beside BentoML: now the routes are in the service's own process, so
# BentoML's metrics, traces and limits see every request.
@bentoml.asgi_app(cb_backend.openai_app(), path="/v1")
@bentoml.service(
    name="bentovllm-after",
    labels={"openai_endpoint": "/v1"},
    workers=1,
    traffic={"timeout": 300},
    resources={"gpu": bento_args.gpu} if bento_args.gpu else {},
)
class LLM(cb_backend.ContinuousBatching):
    # A hub id works too. bentoml.models.HuggingFaceModel("org/name") records the revision in the Bento, as before.
    model = bento_args.model
    # vLLM's names, where the engine has the field (docs/migrate.md has the list).
    engine_config = {"max_model_len": bento_args.max_model_len, "max_num_seqs": bento_args.max_num_seqs}
