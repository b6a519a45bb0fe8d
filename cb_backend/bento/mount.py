"""`cb_backend.openai_app`: the OpenAI routes for any server, or for the BentoML service that they are mounted on.

    @bentoml.asgi_app(cb_backend.openai_app(), path="/v1")
    @bentoml.service
    class LLM(cb_backend.ContinuousBatching): ...

With an engine as its argument nothing of BentoML is imported: `uvicorn.run(cb_backend.openai_app(engine))`.
"""

from __future__ import annotations

from starlette.applications import Starlette

from ..client import EngineClient
from ..openai import app


def openai_app(engine: EngineClient | None = None, *, max_body_bytes: int = app.MAX_BODY_BYTES) -> Starlette:
    """The application.

    Args:
        engine: default: the engine of the BentoML service that the application is mounted on.
        max_body_bytes: a larger body is refused with 413.
    """
    if engine is not None:
        return app.openai_app(engine, max_body_bytes=max_body_bytes)
    from .compat import describe_mounted_applications

    describe_mounted_applications()
    return app.openai_app_of(_engine_of_service, max_body_bytes)


def _engine_of_service() -> EngineClient:
    """
    Raises:
        RequestError: 503, the model is not loaded (yet).
    """
    import bentoml

    engine: EngineClient = bentoml.get_current_service().ready_engine()
    return engine
