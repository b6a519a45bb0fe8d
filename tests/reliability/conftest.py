"""The engine and the client of the HTTP shapes (tests/openai) serve these tests too."""

from __future__ import annotations

from tests.openai.conftest import client, engine

__all__ = ["client", "engine"]
