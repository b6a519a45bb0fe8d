"""The shipped service with one fault: a request for a JSON object breaks in the engine after three tokens."""

from __future__ import annotations

from typing import Any

from cb_backend.assembly import Parts
from integration.service import LLM
from tests.telemetry.external.serving import FAULT


class Breaks:
    """A constraint that allows every token, and fails."""

    def __init__(self) -> None:
        self._left = 3

    @property
    def error(self) -> str | None:
        return FAULT if self.finished else None

    @property
    def finished(self) -> bool:
        return self._left <= 0

    def allowed(self) -> None:
        return None

    def accept(self, token_id: int) -> None:
        self._left -= 1

    def fork(self) -> Breaks:
        raise NotImplementedError("one choice only")


def compile_constraint(parts: Parts, params: Any) -> Breaks:
    return Breaks()


Parts.compile_constraint = compile_constraint  # type: ignore[method-assign, assignment]

__all__ = ["LLM"]
