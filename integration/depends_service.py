"""A front with logic of its own before a model service that runs in another process.

bentoml serve integration.depends_service:Front
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import bentoml

import cb_backend
from cb_backend.bento.native import texts

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
        """The answer as it comes. A client that leaves ends the request in the engine."""
        chat = [{"role": "user", "content": question}]
        # `stream` gives events; `texts` takes the text out of them, and raises when an answer failed or was cut off.
        async for text in texts(self.llm.stream(messages=chat, max_tokens=max_tokens)):
            yield text
