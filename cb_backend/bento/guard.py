"""The outermost layer of a service: what no request may be, whichever route it is for.

Refused before anything reads or logs it: no Host or two (400), control characters in the path (400, they forge lines of
logs), a page of another origin (403, unless it is allowed), a missing or wrong key where keys are set (401), a body
above the limit (413). Probes need no key. Also replaces BentoML's reading of whole bodies of any size.

Settings are environment variables, so that they are the operator's and hold for every service of the process:
`CB_API_KEYS` (comma-separated) or `CB_API_KEYS_FILE` (a line each), `CB_ALLOWED_ORIGINS` (comma-separated, `*` for
all), `CB_MAX_BODY_BYTES`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import Response

from ..errors import RequestError
from ..openai.app import MAX_BODY_BYTES
from ..openai.errors import error_response

# Asked by machines that hold no key. What they answer tells nothing of requests.
PROBES = frozenset(("/livez", "/readyz", "/healthz", "/metrics"))

# C0 and C1 controls, and the separators that some readers of logs take for the end of a line.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class SettingsError(ValueError):
    """A variable of the guard is wrong; one line that names it."""


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """What the operator set.

    Attributes:
        keys: SHA-256 of each key; empty: no key is asked for.
        origins: allowed besides the server's own; None: another layer decides (BentoML's `http.cors`).
    """

    keys: tuple[bytes, ...] = ()
    origins: frozenset[str] | None = frozenset()
    max_body_bytes: int = MAX_BODY_BYTES

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> GuardSettings:
        """
        Raises:
            SettingsError: a file of keys cannot be read or holds none, or a number is none.
        """
        keys = environ.get("CB_API_KEYS", "").split(",")
        if path := environ.get("CB_API_KEYS_FILE"):
            try:
                keys += Path(path).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(f"CB_API_KEYS_FILE: {path} cannot be read: {error}") from None
        kept = [key.strip() for key in keys if key.strip()]
        if not kept and (path or environ.get("CB_API_KEYS")):
            raise SettingsError("CB_API_KEYS or CB_API_KEYS_FILE is set and holds no key; unset it to serve without")
        raw = environ.get("CB_MAX_BODY_BYTES", str(MAX_BODY_BYTES))
        if not raw.isdigit() or int(raw) < 1:
            raise SettingsError(f"CB_MAX_BODY_BYTES must be a positive number of bytes (got {raw[:80]!r})")
        origins = (origin.strip().rstrip("/") for origin in environ.get("CB_ALLOWED_ORIGINS", "").split(","))
        digests = tuple(hashlib.sha256(key.encode()).digest() for key in kept)
        return cls(digests, frozenset(origin for origin in origins if origin), int(raw))


class Turnstile:
    """Lets so many requests begin in one turn of the event loop; the others wait for the next turns, in order.

    What comes together (a burst of a thousand) is then begun over hundreds of turns, and probes, which do not pass
    here, are answered between two of them.
    """

    def __init__(self, per_turn: int = 4) -> None:
        self._per_turn = per_turn
        self._begun = 0  # in this turn
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        loop = asyncio.get_running_loop()
        if self._begun == 0 and not self._waiting:
            loop.call_soon(self._turn)
        if self._begun < self._per_turn and not self._waiting:
            self._begun += 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _turn(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < self._per_turn:
            place = self._waiting.popleft()
            if not place.done():  # cancelled: its client left
                place.set_result(None)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._turn)


class Guard:
    """ASGI middleware.

    Args:
        settings: default: those of the environment.
    """

    def __init__(self, app: Any, settings: GuardSettings | None = None) -> None:
        self._app = app
        self._settings = GuardSettings.from_environment() if settings is None else settings
        self._turnstile = Turnstile()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] not in PROBES:
            await self._turnstile.enter()
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        try:
            origin = self._check(scope, headers)
        except RequestError as error:
            await self._refuse(error)(scope, receive, send)
            return
        allowed = self._cors(headers, origin)
        if allowed is not None and scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await Response(status_code=204, headers=allowed)(scope, receive, send)
            return
        if allowed is None and b"content-length" in headers:
            # The server holds a body to its declared length: nothing has to be watched, neither it nor each event.
            await self._app(scope, receive, send)
            return
        body = _Body(receive, self._settings.max_body_bytes)
        begun = False

        async def sending(message: Any) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                if body.too_large:  # what read it answers for a part of it
                    return
                begun = True
                if allowed is not None:
                    message = {**message, "headers": [*message["headers"], *_raw(allowed)]}
            elif body.too_large and not begun:
                return
            await send(message)

        try:
            await self._app(scope, body.receive, sending)
        except BodyTooLarge:
            if begun:
                raise
        if body.too_large and not begun:
            await self._refuse(self._too_large())(scope, receive, send)

    def _check(self, scope: Any, headers: Mapping[bytes, list[bytes]]) -> str | None:
        """The origin of the page that asks, if it is another's.

        Raises:
            RequestError: this request is not served.
        """
        hosts = headers.get(b"host", [])
        if scope.get("http_version") == "1.0" and not hosts:
            hosts = [b""]  # it has no such header
        elif len(hosts) != 1 or not hosts[0].strip():
            raise RequestError(f"one Host header is needed (got {len(hosts)})", code="invalid_host")
        if _CONTROLS.search(scope["path"]):
            scope["path"] = _CONTROLS.sub("?", scope["path"])  # log lines show this
            raise RequestError("the path holds control characters", code="invalid_path")
        for length in headers.get(b"content-length", []):
            if not length.isdigit() or int(length) > self._settings.max_body_bytes:
                raise self._too_large()
        origin = self._foreign_origin(headers, hosts[0])
        preflight = scope["method"] == "OPTIONS" and origin is not None
        if self._settings.keys and scope["path"] not in PROBES and not preflight:
            self._check_key(headers)
        return origin

    def _foreign_origin(self, headers: Mapping[bytes, list[bytes]], host: bytes) -> str | None:
        """
        Raises:
            RequestError: a page of another site asks, and it is not allowed to.
        """
        found = headers.get(b"origin")
        if not found or self._settings.origins is None:
            return None
        origin = found[0].decode("latin-1").rstrip("/")
        if urlsplit(origin).netloc.encode("latin-1") == host.strip():
            return None
        if not self._settings.origins & {origin, "*"}:
            raise RequestError(
                "pages of this origin are not served; the server's CB_ALLOWED_ORIGINS names those that are",
                status=403,
                code="origin_not_allowed",
            )
        return origin

    def _check_key(self, headers: Mapping[bytes, list[bytes]]) -> None:
        """
        Raises:
            RequestError: 401, there is no key, or none that is known.
        """
        value = headers.get(b"authorization", [b""])[0]
        scheme, _, given = value.partition(b" ")
        if scheme.lower() != b"bearer":
            given = headers.get(b"x-api-key", [b""])[0]
        digest = hashlib.sha256(given.strip()).digest()
        # All are compared, each in constant time.
        if not sum(hmac.compare_digest(digest, key) for key in self._settings.keys):
            what = "is not known" if given else "is missing"
            raise RequestError(
                f"the API key {what}: send Authorization: Bearer KEY", status=401, code="invalid_api_key"
            )

    def _cors(self, headers: Mapping[bytes, list[bytes]], origin: str | None) -> dict[str, str] | None:
        if origin is None:
            return None
        asked = headers.get(b"access-control-request-headers", [b"authorization, content-type"])[0]
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Allow-Headers": asked.decode("latin-1"),
            "Access-Control-Max-Age": "600",
            "Vary": "Origin",
        }

    def _too_large(self) -> RequestError:
        limit = self._settings.max_body_bytes
        return RequestError(f"the body is larger than {limit} bytes", status=413, code="body_too_large")

    @staticmethod
    def _refuse(error: RequestError) -> Response:
        headers = {"Connection": "close"} if error.status == 413 else {}
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return error_response(error, headers)


class BodyTooLarge(Exception):
    """The body is longer than allowed; raised where it is read."""


class _Body:
    """`receive` that ends where the body grows past `limit` bytes."""

    def __init__(self, receive: Any, limit: int) -> None:
        self._receive = receive
        self._left = limit
        self.too_large = False

    async def receive(self) -> Any:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                self.too_large = True
                raise BodyTooLarge
        return message


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
