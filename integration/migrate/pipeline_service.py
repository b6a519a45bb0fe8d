"""A service that called a transformers pipeline, after: its endpoint and its clients stay as they were.

bentoml serve integration.migrate.pipeline_service:Summarizer
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import bentoml

import cb_backend
from cb_backend.bento.endpoints import texts

PROMPT = "Summarize in one sentence:\n\n{text}\n\nSummary:"


@bentoml.service(name="summarizer", workers=1, traffic={"timeout": 300})
class Summarizer(cb_backend.ContinuousBatching):
    model = "smollm2-135m-instruct:latest"

    # Endpoints are async now: a blocking one would serve one request at a time, and nothing would be batched.
    @bentoml.api
    async def summarize(self, text: str, max_tokens: int = 64) -> str:
        answer = await self.generate(PROMPT.format(text=text), max_tokens=max_tokens, temperature=0.0)
        return answer["text"]

    # What a pipeline could not do. A client that leaves ends its request.
    @bentoml.api
    async def summarize_live(self, text: str, max_tokens: int = 64) -> AsyncGenerator[str, None]:
        events = self.stream(prompt=PROMPT.format(text=text), max_tokens=max_tokens, temperature=0.0)
        async for piece in texts(events):
            yield piece
