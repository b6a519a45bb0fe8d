"""The pool's use over the future, as moments of a sum of independent sequences at chosen horizons. Pure numpy.

t steps from now a sequence holds blocks for its known tokens and t more if its output goes on for more than t tokens,
else none. Mean, variance and third moment of such variables add up: the reserve is one for the sum, not a sum of
reserves. What they have in common is the uncertainty of the curves: each chance of going on is the mean of a Beta
posterior over the observations that it rests on, and two outputs share it as far as the lengths overlap that both have
yet to pass.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .lengths import Ints, LengthCurves

Floats = npt.NDArray[np.float32]

_PER_OCTAVE = 6  # horizons from 1/16 of the typical length to 8 times it
_FINE = 2.0 ** (np.arange(-4 * _PER_OCTAVE, 3 * _PER_OCTAVE + 1) / _PER_OCTAVE)
_COARSE = 2.0 ** np.arange(4, 21)
_CAPS = np.linspace(0.0, 1.0, 9)
_TINY = np.float32(1e-6)


class Sequences(NamedTuple):
    """int64 [n] each: what the forecast knows of some sequences."""

    known: Ints  # tokens, prompt and generated
    generated: Ints
    left: Ints  # tokens that max_tokens still allows
    rows: Ints  # length curve (LengthCurves.row)
    shared: Ints  # blocks that are counted elsewhere


class Moments:
    """Of the use of some sequences, in blocks. `table`, float32 [6, h], has for each horizon the mean, the variance,
    the third central moment, the standard deviation that comes from the curves, its square, and the expected number of
    sequences that still run. All six add up over sequences."""

    __slots__ = ("table",)

    def __init__(self, table: Floats) -> None:
        self.table = table

    def plus(self, other: Moments) -> Moments:
        return Moments(self.table + other.table)

    @property
    def alive(self) -> Floats:
        alive: Floats = self.table[5]
        return alive

    def quantile(self, z: float, overlap: Floats | float = 1.0) -> Floats:
        """float32 [h]: use that is exceeded with the probability at which a standard normal exceeds `z`.

        The Cornish-Fisher expansion to the third moment: few or unequal sequences have a longer upper tail.

        Args:
            overlap: correlation of two outputs' uncertainty, float32 [h] or one for all horizons.
        """
        mean, variance, third, common, squares, _alive = self.table
        skew = third / np.maximum(variance * np.sqrt(variance), _TINY)
        tail = z + (z * z - 1.0) / 6.0 * np.minimum(np.maximum(skew, 0.0), 2.0)
        use: Floats = mean + tail * np.sqrt(variance + overlap * np.maximum(common * common - squares, 0.0))
        return use


def overlap(generated: Ints, horizons: Ints) -> Floats:
    """float32 [h]: how much of the next `horizons` tokens two outputs have in common, in the mean over pairs.

    Outputs at g1 and g2 share 1 - |g1 - g2| / t of the next t lengths, or nothing. The mean is that of outputs spread
    evenly with the same standard deviation as `generated`.
    """
    width = max(1.0, float(np.sqrt(12.0) * generated.std())) if len(generated) else 1.0
    part = (horizons / width).astype(np.float32)
    return np.where(part < 1.0, part * (1.0 - part / 3.0), 1.0 - 1.0 / (3.0 * np.maximum(part, 1.0)))


def choose_horizons(typical: float, left: Ints) -> Ints:
    """int64 [h], increasing, from 0: steps from now at which to look.

    Around the typical remaining length they are 12 % apart, where the use is flat; the ends of what max_tokens allows
    (`left`), where it may fall at once, are looked at themselves, up to nine of them.
    """
    end = max(1, int(left.max())) if len(left) else 1  # "now" is always looked at
    caps = np.quantile(left, _CAPS, method="lower") - 1 if len(left) else np.zeros(1)
    all_of_them = np.concatenate([[0], _FINE * typical, _COARSE * typical, caps]).astype(np.int64)
    return np.unique(all_of_them[(all_of_them >= 0) & (all_of_them < end)])


def forecast(sequences: Sequences, horizons: Ints, curves: LengthCurves, block_size: int) -> Moments:
    """Moments of the use of `sequences` together."""
    alive, basis = curves.survival(sequences.rows, sequences.generated, sequences.left, horizons)
    alive *= horizons < sequences.left[:, None]
    tokens = (sequences.known + (block_size - 1))[:, None] + horizons
    blocks = (tokens // block_size - sequences.shared[:, None]).astype(np.float32)
    use = blocks * alive
    spread = use * (blocks - use)  # b^2 p (1 - p)
    table = np.empty((6, len(horizons)), dtype=np.float32)
    np.add.reduce(use, axis=0, out=table[0])
    np.add.reduce(spread, axis=0, out=table[1])
    np.add.reduce(spread * (blocks - 2.0 * use), axis=0, out=table[2])
    spread *= (1.0 / (basis + 2.0))[:, None]
    np.add.reduce(np.sqrt(spread), axis=0, out=table[3])
    np.add.reduce(spread, axis=0, out=table[4])
    np.add.reduce(alive, axis=0, out=table[5])
    return Moments(table)
