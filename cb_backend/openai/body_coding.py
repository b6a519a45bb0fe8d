"""Compressed request bodies, decoded under a bound: a few kilobytes can stand for gigabytes.

gzip and deflate are always there; br and zstd where their packages (`brotli`, `zstandard`) are installed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from ..errors import RequestError


class Decoder(Protocol):
    """Takes compressed bytes; gives at most about `most` decoded ones, and says whether the body is whole."""

    def decode(self, data: bytes, most: int) -> bytes: ...

    @property
    def whole(self) -> bool: ...


class _Zlib:
    def __init__(self, window: int) -> None:
        self._decoder = zlib.decompressobj(window)

    def decode(self, data: bytes, most: int) -> bytes:
        decoded = self._decoder.decompress(data, most)
        if self._decoder.unused_data:
            raise ValueError("more follows its end")
        return decoded

    @property
    def whole(self) -> bool:
        return self._decoder.eof


class _Brotli:
    def __init__(self) -> None:
        self._decoder: Any = import_module("brotli").Decompressor()

    def decode(self, data: bytes, most: int) -> bytes:
        decoded: bytes = self._decoder.process(data, output_buffer_limit=most)
        return decoded

    @property
    def whole(self) -> bool:
        return bool(self._decoder.is_finished())


class _Zstd:
    def __init__(self) -> None:
        self._module: Any = import_module("zstandard")
        self._whole = False

    def decode(self, data: bytes, most: int) -> bytes:
        with self._module.ZstdDecompressor(max_window_size=2**23).stream_reader(data) as reader:
            decoded: bytes = reader.read(most)
            self._whole = not reader.read(1)
        return decoded

    @property
    def whole(self) -> bool:
        return self._whole


_ALWAYS: dict[str, Callable[[], Decoder]] = {
    "gzip": lambda: _Zlib(16 + zlib.MAX_WBITS),
    "x-gzip": lambda: _Zlib(16 + zlib.MAX_WBITS),
    "deflate": lambda: _Zlib(zlib.MAX_WBITS),
}
_WITH_PACKAGE: dict[str, tuple[str, Callable[[], Decoder]]] = {"br": ("brotli", _Brotli), "zstd": ("zstandard", _Zstd)}


def codings() -> dict[str, Callable[[], Decoder]]:
    """What can be decoded here, by the names of `Content-Encoding`."""
    there = {name: make for name, (package, make) in _WITH_PACKAGE.items() if find_spec(package) is not None}
    return {**_ALWAYS, **there}


def check_coding(coding: str) -> None:
    """
    Raises:
        RequestError: 415, naming the coding.
    """
    known = codings()
    if coding not in ("", "identity") and coding not in known:
        raise RequestError(
            f"the body's content-encoding {coding[:40]!r} is not read here; there are {', '.join(sorted(known))}",
            status=415,
            code="unsupported_encoding",
        )


def decoded(body: bytes, coding: str, limit: int) -> bytes:
    """The body without its coding, which `check_coding` took.

    Raises:
        RequestError: 413, it is larger than `limit` bytes when decoded; 400, it is not of that coding, or cut.
    """
    if coding in ("", "identity"):
        return body
    decoder = codings()[coding]()
    try:
        text = decoder.decode(body, limit + 1)
    except Exception as error:  # each library has its own
        raise RequestError(f"the body is no whole {coding}: {error}", code="invalid_encoding") from None
    if len(text) > limit:
        raise RequestError(f"the body is larger than {limit} bytes when decoded", status=413, code="body_too_large")
    if not decoder.whole:
        raise RequestError(f"the body is no whole {coding}: it is cut", code="invalid_encoding")
    return text
