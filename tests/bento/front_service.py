"""The shipped front, with the engine's numbers passed through for the tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import bentoml

import cb_backend
from cb_backend.bento.endpoints import texts

LLM = cb_backend.llm_service("from CB_MODEL", name="llm")
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@bentoml.service(name="front", traffic={"timeout": 300})
class Front:
    llm = bentoml.depends(LLM)

    @bentoml.api
    async def ask(self, question: str, max_tokens: int) -> str:
        answer = await self.llm.generate(prompt=question, max_tokens=max_tokens, **GREEDY)
        return answer["text"]

    @bentoml.api
    async def tell(self, question: str, max_tokens: int, n: int = 1) -> AsyncGenerator[str, None]:
        async for text in texts(self.llm.stream(prompt=question, max_tokens=max_tokens, n=n, **GREEDY)):
            yield text

    @bentoml.api
    async def stats(self) -> dict[str, float]:
        return await self.llm.stats()
