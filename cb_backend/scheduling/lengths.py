"""How long outputs get: survival curves of observed output lengths, per request class. Pure numpy, no clock.

A request that ended by itself (`stop`) is an observation of its length. One that was cut (max_tokens, abort, timeout,
error) says only that its length is greater: a censored observation, which Kaplan and Meier's product-limit estimator
(JASA 53, 1958) uses without bias. So are the requests that run now: without them a cold start would believe in short
outputs, because those end first. Newer observations count more: a weight halves every `half_life` observations.

Three levels answer together, each weighted by the observations it has beyond the tokens already generated: the
class's curve, the model-wide curve, and what is believed where no output has been: that every order of magnitude up to
max_tokens is as likely (a density of 1 / length, which prefers no scale). The same belief continues a curve beyond the
longest output that it knows.

Lengths are kept on a fixed scale: exact below 128, then 64 steps per octave. Observations round up and questions
round down, so that rounding (at most 1.6 %) never makes an output look shorter.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import RequestError

logger = logging.getLogger("cb_backend")

MAX_CLASSES = 1000
MAX_CLASS_LENGTH = 64
HALF_LIFE = 512
FORMAT = 1

# Observations beyond the current length at which a level gets half of the weight. A class is usually like the others;
# what is believed without observations is believed only until there are some.
CLASS_PRIOR = 8.0
MODEL_PRIOR = 0.5

NEVER_ENDS = -1  # in place of a row: an output that can only be cut, at max_tokens

MAX_LENGTH = 2**20
_EXACT, _STEPS = 128, 64
_MAX_WEIGHT = 1e12  # of a saved point: sums of it stay finite in float32
_TINY = np.float32(1e-30)  # keeps 0 / 0 out where no output is known to get as far

Floats = npt.NDArray[np.float32]
Weights = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Points = npt.NDArray[np.int16]


def _make_scale() -> Ints:
    octaves = int(math.log2(MAX_LENGTH / _EXACT))
    wide = [(_STEPS + i) * (_EXACT << octave) // _STEPS for octave in range(octaves) for i in range(_STEPS)]
    return np.array([*range(_EXACT), *wide, MAX_LENGTH], dtype=np.int64)


SCALE = _make_scale()  # [num_points]: the lengths that the curves tell apart
_POINTS = len(SCALE)
_WIDTH = np.append(np.diff(SCALE), 1).astype(np.float64)  # tokens from a point to the next
_LOG = np.log(np.maximum(SCALE, 1)).astype(np.float32)
_DOWN = (np.searchsorted(SCALE, np.arange(MAX_LENGTH + 1), side="right") - 1).astype(np.int16)  # length -> point


def points_below(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int16]:
    """Index of the last point of `SCALE` that is not above each length."""
    return _DOWN.take(lengths, mode="clip")


def point_above(length: int) -> int:
    """Index of the first point of `SCALE` that is not below `length`."""
    point = int(_DOWN[min(length, MAX_LENGTH)])
    return point + int(SCALE[point] < min(length, MAX_LENGTH))


def validate_class(name: str) -> str:
    """Returns the class's name.

    Raises:
        RequestError: it is not text of at most 64 characters.
    """
    if not isinstance(name, str) or len(name) > MAX_CLASS_LENGTH:
        got = f"{len(name)} characters" if isinstance(name, str) else repr(name)
        raise RequestError(
            f"'request_class': a class name is text of at most {MAX_CLASS_LENGTH} characters (got {got})",
            param="request_class",
        )
    return name


class LengthCurves:
    """Survival curves by class. Row 0 is the model-wide curve; a class gets a row with its first observation.

    The least recently observed class is forgotten when `max_classes` is exceeded. Not thread-safe: the engine thread
    observes and asks; `save` may run after it has stopped.
    """

    def __init__(self, half_life: int = HALF_LIFE, max_classes: int = MAX_CLASSES) -> None:
        self._growth = 2.0 ** (1.0 / half_life)
        self._max_classes = max_classes
        self._rows: OrderedDict[str, int] = OrderedDict()  # least recently observed first
        self.num_observed = 0  # since the start
        self._shortest: Mapping[str, int] = MappingProxyType({})  # as of the last `shortest_by_class`
        self._changed: set[str] = set()  # classes whose entry in it may be wrong
        self._reset(1)

    def _reset(self, rows: int) -> None:
        self._changed.update(self._rows, ("",))
        self._rows.clear()
        self._ended = np.zeros((rows, _POINTS))  # [rows, points]: weight of the lengths that were seen to end
        self._cut = np.zeros((rows, _POINTS))  # the same of the censored ones
        self._unit = np.ones(rows)  # [rows]: weight of the newest observation
        self._stale = np.zeros(rows, dtype=np.int64)  # observations since the row's tables were made
        self._survival = np.ones((rows, _POINTS), dtype=np.float32)  # P(length > point)
        self._beyond = np.zeros((rows, _POINTS), dtype=np.float32)  # effective observations beyond the point
        self._last = np.zeros(rows, dtype=np.int16)  # the last point that an output is known to have got to
        self._age = np.zeros(rows, dtype=np.int64)  # calls of `include_running` since the row's tables were made
        # Rows and points of the running requests, as of the last `include_running`.
        self._running = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int16)

    @property
    def num_classes(self) -> int:
        return len(self._rows)

    def row(self, request_class: str) -> int:
        """The class's row, or 0 for one without observations."""
        return self._rows.get(request_class, 0)

    def effective_observations(self, request_class: str = "") -> float:
        """Sum of the class's weights, the newest observation being 1."""
        row = self.row(request_class)
        return float((self._ended[row].sum() + self._cut[row].sum()) / self._unit[row])

    # -- observing --------------------------------------------------------------------------------------------------

    def observe(self, request_class: str, length: int, ended: bool) -> None:
        """One output of `length` tokens: `ended` by itself, or cut there (its length is then greater)."""
        self.num_observed += 1
        self._changed.update(("", request_class))
        if request_class:
            self._add(self._touch(request_class), length, ended)
        self._add(0, length, ended)

    def _add(self, row: int, length: int, ended: bool) -> None:
        self._unit[row] *= self._growth
        if self._unit[row] > 1e12:
            self._ended[row] /= self._unit[row]
            self._cut[row] /= self._unit[row]
            self._unit[row] = 1.0
        if ended:
            self._ended[row, point_above(length)] += self._unit[row]
        else:
            self._cut[row, _DOWN[min(length, MAX_LENGTH)]] += self._unit[row]
        self._stale[row] += 1

    def _touch(self, request_class: str) -> int:
        row = self._rows.get(request_class)
        if row is None:
            if len(self._rows) >= self._max_classes:
                forgotten, row = self._rows.popitem(last=False)
                self._changed.add(forgotten)
                self._clear(row)
            else:
                row = len(self._rows) + 1
                if row >= len(self._unit):
                    self._enlarge(min(2 * len(self._unit), self._max_classes) + 1)
            self._rows[request_class] = row
        self._rows.move_to_end(request_class)
        return row

    def _clear(self, row: int) -> None:
        self._ended[row] = self._cut[row] = 0.0
        self._unit[row] = 1.0
        self._stale[row] = 1

    def _enlarge(self, rows: int) -> None:
        for name, fill in (
            ("_ended", 0),
            ("_cut", 0),
            ("_unit", 1),
            ("_stale", 0),
            ("_survival", 1),
            ("_beyond", 0),
            ("_last", 0),
            ("_age", 0),
        ):
            old = getattr(self, name)
            new = np.full((rows, *old.shape[1:]), fill, dtype=old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)

    # -- tables -----------------------------------------------------------------------------------------------------

    def include_running(self, rows: Ints, generated: Ints, most: int = 8, every: int = 16) -> None:
        """Brings tables up to date, with the running requests (`rows`, tokens `generated`) as censored observations.

        A row is made again after enough observations (1 in 64 of what it knows), and after `every` calls, since the
        running requests got longer. At most `most` rows per call, so that a step's cost is bounded; the others follow.
        """
        if len(rows) and rows.min() < 0:
            rows, generated = rows[rows >= 0], generated[rows >= 0]
        self._running = rows, points_below(generated)
        present = np.unique(np.append(rows, 0))
        self._age[present] += 1
        due = [int(row) for row in present if self._is_due(int(row)) or self._age[row] >= every]
        due.sort(key=lambda row: (row != 0, -self._age[row], row))
        for row in due[:most]:
            self._build(row)

    def _is_due(self, row: int) -> bool:
        return bool(self._stale[row] * 64 > self._beyond[row, 0])

    def _build(self, row: int) -> None:
        ended = self._ended[row] / self._unit[row]
        known = ended + self._cut[row] / self._unit[row]
        rows, points = self._running
        known += np.bincount(points if row == 0 else points[rows == row], minlength=_POINTS)
        at_risk = np.cumsum(known[::-1])[::-1]
        hazard = np.divide(ended, at_risk, out=np.zeros(_POINTS), where=ended > 0)
        self._survival[row] = np.cumprod(1.0 - np.minimum(hazard, 1.0))
        self._beyond[row] = np.append(at_risk[1:], 0.0)
        self._last[row] = max(0, int(np.count_nonzero(at_risk)) - 1)
        self._stale[row] = self._age[row] = 0

    def survival(self, rows: Ints, generated: Ints, left: Ints, horizons: Ints) -> tuple[Floats, Floats]:
        """Chances that outputs go on, from the tables as they are.

        Args:
            rows, generated: int64 [n]: curve (`NEVER_ENDS`: none) and tokens so far of each output.
            left: int64 [n]: tokens that max_tokens still allows it.
            horizons: int64 [h]: further tokens.

        Returns:
            float32 [n, h]: P(length > generated + horizon | length > generated), for horizons < left.
            float32 [n]: how many observations this rests on.
        """
        until = points_below(generated[:, None] + horizons)
        at = points_below(generated)
        limit = np.log(np.maximum(generated + left, 2)).astype(np.float32)
        beyond_all = np.maximum(limit[:, None] - _LOG[until], 0.0)
        alive = self._model_wide(at, until, limit, beyond_all)
        seen = self._beyond[0][at]
        own = np.flatnonzero(rows)
        if len(own) and rows.min() < 0:
            alive[rows < 0] = 1.0
            own = np.flatnonzero(rows > 0)
        if len(own):
            row, at, basis = rows[own], at[own], seen[own]
            seen = seen.copy()
            until, limit, beyond_all = until[own], limit[own], beyond_all[own]
            last = np.maximum(self._last[row], at)
            known = self._survival[row[:, None], until]
            known *= np.where(until > last[:, None], self._model_wide(last, until, limit, beyond_all), 1.0)
            beyond = self._beyond[row, at]
            known *= (beyond / (beyond + CLASS_PRIOR) / np.maximum(self._survival[row, at], _TINY))[:, None]
            alive[own] *= (CLASS_PRIOR / (beyond + CLASS_PRIOR))[:, None]
            alive[own] += known
            seen[own] = beyond + np.minimum(basis, CLASS_PRIOR)
        return np.minimum(alive, 1.0), seen  # rounding may exceed 1

    def _model_wide(self, at: Points, until: Points, limit: Floats, beyond_all: Floats) -> Floats:
        """float32 [n, h]: P(length > until | length > at) by the model-wide curve and what is believed without it.

        Args:
            at, until: int16 [n], [n, h]: points of `SCALE`.
            limit: float32 [n]: logarithm of max_tokens.
            beyond_all: float32 [n, h]: max(0, limit - log(until)), in proportion to the prior's P(length > until).
        """
        seen = self._beyond[0][at]
        weight = seen / (seen + MODEL_PRIOR)
        longest = np.maximum(limit - _LOG[np.maximum(at, self._last[0])], _TINY)
        known: Floats = np.minimum(beyond_all / longest[:, None], 1.0)
        known *= self._survival[0][until]
        known *= (weight / np.maximum(self._survival[0][at], _TINY))[:, None]
        known += beyond_all * ((1.0 - weight) / np.maximum(limit - _LOG[at], _TINY))[:, None]
        return known

    def remaining(self, request_class: str, generated: int, max_tokens: int) -> float:
        """Expected number of tokens still to come, of a running output with `generated` < `max_tokens`."""
        most = max_tokens - generated
        if most <= 0:
            return 0.0
        row = self.row(request_class)
        for each in {0, row}:
            if self._is_due(each):
                self._build(each)
        first, last = int(_DOWN[min(generated, MAX_LENGTH)]), int(_DOWN[min(max_tokens - 1, MAX_LENGTH)])
        start = np.maximum(SCALE[first : last + 1], generated) - generated
        end = np.minimum(SCALE[first : last + 1] + _WIDTH[first : last + 1], max_tokens) - generated
        alive = self.survival(np.array([row]), np.array([generated]), np.array([most]), start)[0][0].astype(np.float64)
        return float(alive @ (end - start))  # E[R] is the sum over t >= 0 of P(R > t)

    def shortest(self, request_class: str, enough: float = 100.0) -> int:
        """Tokens of the class's shortest output in memory; 1 with fewer than `enough` effective observations."""
        row = self.row(request_class)
        if (request_class and row == 0) or self.effective_observations(request_class) < enough:
            return 1
        return max(1, int(SCALE[np.argmax(self._ended[row] > 0)]))

    def shortest_by_class(self) -> Mapping[str, int]:
        """`shortest` of every class for which it is not 1, as a value that later observations do not change."""
        if self._changed:
            lengths = dict(self._shortest)
            for request_class in self._changed:
                lengths[request_class] = self.shortest(request_class)
                if lengths[request_class] == 1:
                    del lengths[request_class]
            self._shortest = MappingProxyType(lengths)
            self._changed.clear()
        return self._shortest

    # -- keeping over a restart -------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Writes all curves as JSON, in one replacement of the file. A failure is logged: the engine still stops."""
        document = {
            "format": FORMAT,
            "classes": [[name, self._dump(row)] for name, row in (("", 0), *self._rows.items())],
        }
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
            os.replace(temporary, path)
        except OSError as error:
            logger.warning("length curves were not saved to %s: %s", path, error)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _dump(self, row: int) -> dict[str, list[list[float]]]:
        def pairs(weights: Weights) -> list[list[float]]:
            relative = weights / self._unit[row]
            return [[int(SCALE[i]), round(float(relative[i]), 6)] for i in np.flatnonzero(relative >= 5e-7)]

        return {"ended": pairs(self._ended[row]), "cut": pairs(self._cut[row])}

    def load(self, path: Path) -> None:
        """Replaces all curves by saved ones. No file: nothing happens; a damaged one: a warning, and a blind start."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("length curves in %s cannot be read (%s): starting without observations", path, error)
            return
        try:
            document = json.loads(text)
            if document["format"] != FORMAT:
                raise ValueError(f"format {document['format']!r}, this version reads {FORMAT}")
            curves = [(str(name), _pairs(curve["ended"]), _pairs(curve["cut"])) for name, curve in document["classes"]]
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            logger.warning("length curves in %s are damaged (%s): starting without observations", path, error)
            return
        self._reset(1)
        for name, ended, cut in curves:
            row = self._touch(name[:MAX_CLASS_LENGTH]) if name else 0
            for length, weight in ended:
                self._ended[row, point_above(length)] += weight
            for length, weight in cut:
                self._cut[row, _DOWN[min(length, MAX_LENGTH)]] += weight
            self._changed.add(name[:MAX_CLASS_LENGTH])
            self._build(row)


def _pairs(values: Iterable[Any]) -> list[tuple[int, float]]:
    """(length, weight) pairs out of JSON.

    Raises:
        ValueError: a length is not a whole number of tokens, or a weight is not in (0, 1e12].
    """
    pairs = [(length, float(weight)) for length, weight in values]
    for length, weight in pairs:
        if type(length) is not int or length < 0 or not 0 < weight <= _MAX_WEIGHT:
            raise ValueError(f"[{length!r:.40}, {weight!r}] is not a length and its weight")
    return pairs
