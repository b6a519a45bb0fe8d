"""A JSON schema of a few hundred bytes that takes as long to compile as a test wants."""

from __future__ import annotations

from typing import Any


def slow_schema(kinds: int) -> dict[str, Any]:
    """All its 3 ** kinds combinations are spelt out: 6 kinds take 0.2 s, one kind more three times as long."""
    alternatives = [
        {"anyOf": [{"type": "object", "properties": {f"{kind}{i}": {"type": "integer"}}} for i in range(3)]}
        for kind in range(kinds)
    ]
    return {"type": "object", "allOf": alternatives}
