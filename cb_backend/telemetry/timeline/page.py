"""The page `/cb/timeline`: the flight recorder in a browser, live or from a saved file.

The page is one self-contained file: it loads nothing from anywhere, so it works where there is no internet. It shows
request ids and token counts, never text; the operator switches it on with `CB_TIMELINE=1`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING

from .recorder import Recorder

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

PATH = "/cb/timeline"


def timeline_enabled() -> bool:
    return os.environ.get("CB_TIMELINE", "").strip().lower() in ("1", "true")


def page() -> str:
    return resources.files(__package__).joinpath("timeline.html").read_text(encoding="utf-8")


def timeline_app(find_recorder: Callable[[], Recorder | None]) -> Starlette:
    """An app to mount at `PATH`: `/` is the page, `/data?since=STEP` the recording's steps after STEP as JSON.

    `find_recorder` gives None until the engine has started: the page then says that it is not connected.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import HTMLResponse, JSONResponse
    from starlette.routing import Route

    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"

    async def show(request: Request) -> Response:
        return HTMLResponse(page(), headers={"Content-Security-Policy": policy, "Cache-Control": "no-store"})

    async def data(request: Request) -> Response:
        raw = request.query_params.get("since", "0")
        if not (raw.isascii() and raw.isdigit() and len(raw) < 19):
            message = f"'since': must be a step number, 0 or more (got {raw[:40]!r})"
            return JSONResponse({"error": {"message": message}}, status_code=400)
        recorder = find_recorder()
        if recorder is None:
            return JSONResponse({"error": {"message": "the engine has not started"}}, status_code=503)
        try:
            epoch = float(request.query_params.get("epoch") or "nan")
        except ValueError:
            epoch = float("nan")
        recording = await run_in_threadpool(recorder.snapshot, int(raw), epoch)
        return JSONResponse(recording, headers={"Cache-Control": "no-store"})

    return Starlette(routes=[Route("/", show), Route("/data", data)])
