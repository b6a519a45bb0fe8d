"""Charts as SVG: well-formed, every point where its value says."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from integration.benchmarks.plot import chart

SVG = "{http://www.w3.org/2000/svg}"


def lines(document: str) -> list[list[tuple[float, float]]]:
    found = ET.fromstring(document).iter(SVG + "polyline")
    return [[tuple(map(float, p.split(","))) for p in line.attrib["points"].split()] for line in found]  # type: ignore[misc]


def test_a_linear_chart_begins_at_zero_and_puts_values_in_proportion():
    [line] = lines(chart("t", "x", "y", {"a": [(0, 0), (5, 1), (10, 2)]}))
    assert line == [(70.0, 370.0), (320.0, 205.0), (570.0, 40.0)]


def test_doublings_are_equally_far_apart_on_logarithmic_axes():
    [line] = lines(chart("t", "x", "y", {"a": [(1, 1), (2, 4), (4, 16)]}, log_x=True, log_y=True))
    assert line == [(70.0, 370.0), (320.0, 205.0), (570.0, 40.0)]


def test_every_series_has_its_line_its_colour_and_its_name():
    document = chart("a < b", "x", "y", {"one": [(1, 1)], "two & three": [(2, 2)]})
    root = ET.fromstring(document)
    texts = [text.text for text in root.iter(SVG + "text")]
    assert {"a < b", "x", "y", "one", "two & three"} <= set(texts)
    assert len({line.attrib["stroke"] for line in root.iter(SVG + "polyline")}) == 2


def test_a_chart_of_nothing_is_refused():
    with pytest.raises(ValueError, match="has no points"):
        chart("empty", "x", "y", {"a": []})
