"""Before and after of a BentoML 1.0 style service: one line changes, the calls stay.

    bentoml serve integration.legacy_service:svc

Such services are deprecated by BentoML; a new one is written as in service.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import bentoml
from bentoml.io import JSON, Text

import cb_backend

# Before: runner = bentoml.transformers.get("smollm2-135m-instruct:latest").to_runner()
# After: fields of cb_backend.EngineConfig may follow, such as max_num_seqs=64.
runner = cb_backend.to_runner("smollm2-135m-instruct:latest", name="llm")

svc = bentoml.legacy.Service("llm-legacy", runners=[runner])


# [{"generated_text": prompt and completion}], as from a transformers text-generation runner.
@svc.api(input=JSON(), output=JSON())
async def generate(body: dict[str, Any]) -> Any:
    return await runner.async_run(body.pop("prompt"), **body)


# Text as it comes. A client that leaves ends its request; a failure breaks the connection.
@svc.api(input=JSON(), output=Text())
async def stream(body: dict[str, Any]) -> AsyncIterator[str]:
    async for text in runner.stream.async_stream(body.pop("prompt"), **body):
        yield text
