"""A front with logic of its own before a model service that runs in another process.

bentoml serve integration.depends_service:Front
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import bentoml

import cb_backend

# The model's service must be at the top level of a module. `llm_service` sets the timeouts and connection limits that
# keep long streams whole, and takes every option of bentoml.service, such as resources={"gpu": 1}.
LLM = cb_backend.llm_service("smollm2-135m-instruct:latest", name="llm")


@bentoml.service(name="front", traffic={"timeout": 300})
class Front:
    llm = bentoml.depends(LLM)

    @bentoml.api
    async def ask(self, question: str, max_tokens: int = 64) -> str:
        """The whole answer."""
        chat = [{"role": "user", "content": question}]
        answer = await self.llm.chat(messages=chat, max_tokens=max_tokens)
        return answer["text"]

    @bentoml.api
    async def tell(self, question: str, max_tokens: int = 64) -> AsyncGenerator[str, None]:
        """The answer as it comes, in server-sent events. A client that leaves ends the request in the engine."""
        chat = [{"role": "user", "content": question}]
        # Passed on as they are, the events also tell of a failure. `cb_backend.bento.endpoints.texts(...)` around the
        # stream gives the bare text and raises on a failure; but what a front raises after its first piece, BentoML
        # hides from the client.
        async for events in self.llm.stream(messages=chat, max_tokens=max_tokens):
            yield events
