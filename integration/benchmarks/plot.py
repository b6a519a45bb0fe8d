"""Line charts as SVG text, without a dependency: one function, deterministic, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 40, 50
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6a3d9a", "#444444")


class _Axis:
    """Maps values to pixels, linearly or by logarithm, and knows its ticks."""

    def __init__(self, values: Sequence[float], first: float, last: float, log: bool) -> None:
        self.log, self.first, self.last = log, first, last
        low, high = min(values), max(values)
        if not log:
            low = min(0.0, low)
        if low == high:
            high = low * 2 if low else 1.0
        self.low, self.high = low, high

    def pixel(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)

    def ticks(self) -> list[float]:
        if self.log:
            base = 2.0 if self.high / self.low < 2000 and self.low >= 1 else 10.0
            lowest = math.ceil(math.log(self.low, base) - 1e-9)
            highest = math.floor(math.log(self.high, base) + 1e-9)
            return [base**power for power in range(lowest, highest + 1)]
        step = 10 ** math.floor(math.log10(self.high - self.low))
        for divisor in (5, 2, 1):
            if (self.high - self.low) / (step / divisor) <= 8:
                step /= divisor
                break
        return [step * i for i in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]


def chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Points],
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """An SVG document with one line per series. On a logarithmic axis every value must be positive.

    Raises:
        ValueError: there is no point to draw.
    """
    points = [point for line in series.values() for point in line]
    if not points:
        raise ValueError(f"chart {title!r} has no points")
    x_axis = _Axis([x for x, _ in points], _LEFT, _WIDTH - _RIGHT, log_x)
    y_axis = _Axis([y for _, y in points], _HEIGHT - _BOTTOM, _TOP, log_y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for tick in x_axis.ticks():
        x = x_axis.pixel(tick)
        parts.append(f'<path d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:g}</text>')
    for tick in y_axis.ticks():
        y = y_axis.pixel(tick)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#dddddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    middle_x, middle_y = (_LEFT + _WIDTH - _RIGHT) / 2, (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(f'<text x="{middle_x}" y="{_HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text transform="translate(18 {middle_y}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    for i, (name, line) in enumerate(series.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        path = " ".join(f"{x_axis.pixel(x):.1f},{y_axis.pixel(y):.1f}" for x, y in line)
        y = _TOP + 14 + 20 * i
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<path d="M{_WIDTH - _RIGHT + 12} {y - 4}h22" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{_WIDTH - _RIGHT + 40}" y="{y}">{escape(name)}</text>'
        )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"
