"""Seeds of choices: what their noise is a function of, beside position and token id."""

from __future__ import annotations


def seed_of_choice(seed: int | None, engine_seed: int, order: int, index: int) -> int:
    """Choice i has the seed `seed + i`, so a request of one choice with that seed repeats it alone.

    Args:
        seed: None gives a value of the request's own.
        order: the request's number among all of this engine.
    """
    if seed is None:
        seed = _mix(engine_seed, order + 1)
    return (seed + index + 2**63) % 2**64 - 2**63  # signed 64 bits


def _mix(a: int, b: int) -> int:
    """A signed 64-bit value that depends on every bit of both (splitmix64's finalizer)."""
    z = (a * 0x9E3779B97F4A7C15 + b * 0xD1B54A32D192ED03) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z
