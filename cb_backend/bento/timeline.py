"""The timeline page on a service, where the operator asked for it with `CB_TIMELINE=1`.

@cb_backend.timeline
@bentoml.service(...)
class LLM(cb_backend.ContinuousBatching): ...
"""

from __future__ import annotations

from typing import TypeVar

import bentoml

from ..errors import RequestError
from ..telemetry.timeline.page import PATH, timeline_app, timeline_enabled
from ..telemetry.timeline.recorder import Recorder

Service = TypeVar("Service")


def timeline(service: Service) -> Service:
    """Mounts the page at `/cb/timeline` of a decorated `ContinuousBatching`, or leaves the service as it is."""
    if not timeline_enabled():
        return service
    mounted: Service = bentoml.asgi_app(timeline_app(_recorder), path=PATH)(service)
    return mounted


def _recorder() -> Recorder | None:
    service = bentoml.get_current_service()
    try:
        telemetry = service.ready_engine().telemetry
    except RequestError:
        return None
    return None if telemetry is None else telemetry.recorder
