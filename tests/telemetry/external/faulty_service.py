"""The shipped service with one fault: a request for a JSON object breaks in the engine after three tokens."""

from __future__ import annotations

from typing import Any

from cb_backend.engine.build import Parts
from integration.benchmarks.offline import EndsAfter
from integration.service import LLM
from tests.telemetry.external.serving import FAULT


class Breaks(EndsAfter):
    """A constraint that fails where the other one is satisfied."""

    @property
    def error(self) -> str | None:  # type: ignore[override]
        return FAULT if self.finished else None


def compile_constraint(parts: Parts, params: Any) -> Breaks:
    return Breaks(3)


Parts.compile_constraint = compile_constraint  # type: ignore[method-assign, assignment]

__all__ = ["LLM"]
