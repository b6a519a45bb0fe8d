"""Length curves: exact survival by hand, censoring, forgetting, back-off, bounds, and the file that keeps them."""

from __future__ import annotations

import logging
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_backend.errors import RequestError
from cb_backend.scheduling.lengths import (
    CLASS_PRIOR,
    MAX_LENGTH,
    MODEL_PRIOR,
    NEVER_ENDS,
    SCALE,
    LengthCurves,
    point_above,
    points_below,
    validate_class,
)
from tests.pace import pure_python, seconds_of

FOREVER = 10**9  # a half-life so long that every observation weighs 1


def curves_of(*observations: tuple[str, int, bool], half_life: int = FOREVER) -> LengthCurves:
    curves = LengthCurves(half_life)
    for request_class, length, ended in observations:
        curves.observe(request_class, length, ended)
    return curves


def survival(
    curves: LengthCurves, generated: int, horizons: list[int], request_class: str = "", most: int = 1000
) -> list[float]:
    rows = np.array([curves.row(request_class)])
    curves.include_running(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    curves.include_running(rows, np.zeros(1, dtype=np.int64), every=10**9)
    alive, _basis = curves.survival(rows, np.array([generated]), np.array([most - generated]), np.array(horizons))
    return alive[0].tolist()


def believed(generated: int, until: int, most: int = 1000) -> float:
    """P(length > until | length > generated) where every order of magnitude up to `most` is equally likely."""
    return math.log(most / max(until, 1)) / math.log(most / max(generated, 1))


def mixed(known: float, seen: float, otherwise: float, prior: float = MODEL_PRIOR) -> float:
    """What `seen` observations say, and what is said otherwise with the weight `prior`."""
    weight = seen / (seen + prior)
    return weight * known + (1 - weight) * otherwise


def test_scale_is_exact_below_128_and_64_steps_per_octave_above():
    assert SCALE[:130].tolist() == [*range(129), 130]
    assert all(b - a <= max(1, a / 64) for a, b in pairwise(SCALE.tolist()))
    assert SCALE[-1] == MAX_LENGTH


def test_observations_round_up_and_questions_round_down():
    assert SCALE[point_above(129)] == 130
    assert SCALE[points_below(np.array([129]))[0]] == 128
    assert SCALE[point_above(MAX_LENGTH + 5)] == SCALE[points_below(np.array([MAX_LENGTH + 5]))[0]] == MAX_LENGTH


def test_nothing_known_means_that_every_order_of_magnitude_up_to_max_tokens_is_as_likely():
    expected = sum(believed(30, 30 + t, 100) for t in range(70))
    assert LengthCurves().remaining("chat", 30, 100) == pytest.approx(expected, rel=1e-5)
    assert expected == pytest.approx(70 / math.log(100 / 30) - 30, abs=0.6)  # the mean of a density 1 / length


def test_a_blind_start_never_goes_beyond_max_tokens():
    assert LengthCurves().remaining("", 0, 1) == 1.0
    assert survival(LengthCurves(), 0, [0, 1, 9], most=10) == pytest.approx([1.0, 1.0, believed(0, 9, 10)])


def test_survival_of_four_outputs_by_hand():
    curves = curves_of(*(("", length, True) for length in (1, 2, 2, 4)))
    # P(L > 1) = 3/4, P(L > 2) = 1/4, P(L > 4) = 0; 4 outputs are known to exceed 0.
    expected = [mixed(p, 4, believed(0, t)) for t, p in enumerate((1.0, 0.75, 0.25, 0.25, 0.0))]
    assert survival(curves, 0, [0, 1, 2, 3, 4]) == pytest.approx(expected)


def test_survival_is_conditional_on_what_is_generated():
    curves = curves_of(*(("", length, True) for length in (1, 2, 2, 4)))
    # Three outputs exceed 1 token, one of them exceeds 2.
    expected = [mixed(1 / 3, 3, believed(1, 2)), mixed(0.0, 3, believed(1, 4))]
    assert survival(curves, 1, [1, 3]) == pytest.approx(expected)


def test_a_cut_output_is_not_a_short_one():
    curves = curves_of(("", 2, True), ("", 3, False), ("", 5, True), ("", 5, True))
    # At 2: 1 of 4 ends. The one cut at 3 was at risk until then. At 5: both that are left end.
    expected = [mixed(p, 4, believed(0, t)) for p, t in ((0.75, 2), (0.75, 4), (0.0, 5))]
    assert survival(curves, 0, [2, 4, 5]) == pytest.approx(expected)


def test_beyond_the_longest_known_output_it_goes_on_as_believed():
    curves = curves_of(("", 2, True), ("", 9, False))
    # Half of them exceed 2 and are known to get to 9; nothing more is known about the way from 9 to 500.
    expected = [mixed(0.5, 2, believed(0, 9)), mixed(0.5 * believed(9, 500), 2, believed(0, 500))]
    assert survival(curves, 0, [9, 500]) == pytest.approx(expected, rel=1e-5)


def test_beyond_the_longest_output_of_its_class_the_model_wide_curve_goes_on():
    curves = curves_of(("json", 3, False), ("", 4, True), ("", 8, True))
    model_wide = mixed(0.0, 2, believed(3, 8))  # of the two that got beyond 3 tokens, none gets beyond 8
    alone = mixed(0.0, 3, believed(0, 8))
    assert survival(curves, 0, [8], "json") == pytest.approx([mixed(model_wide, 1, alone, CLASS_PRIOR)])


def test_running_requests_count_as_cut_where_they_are():
    curves = curves_of(("", 2, True))
    curves.include_running(np.zeros(3, dtype=np.int64), np.array([7, 7, 1]))
    zero = np.zeros(1, dtype=np.int64)
    alive, basis = curves.survival(zero, zero, np.array([1000]), np.array([1, 2]))
    # At 2 tokens three are at risk (the ended one and two that have 7), one ends; all four exceed 0 tokens.
    assert alive[0].tolist() == pytest.approx([1.0, mixed(2 / 3, 4, believed(0, 2))])
    assert basis[0] == 4.0


def test_running_requests_are_not_observed_twice():
    curves = curves_of(("", 2, True))
    for _ in range(3):
        curves.include_running(np.zeros(1, dtype=np.int64), np.array([7]), every=1)
    zero = np.zeros(1, dtype=np.int64)
    _alive, basis = curves.survival(zero, zero, np.array([1000]), np.array([1]))
    assert basis[0] == 2.0


def test_a_question_between_two_steps_keeps_the_running_requests():
    # 1 of 4 that got to 2 tokens ended there; asking brings the new observation in and forgets none.
    curves = LengthCurves(FOREVER)
    curves.include_running(np.zeros(3, dtype=np.int64), np.array([7, 7, 7]))
    curves.observe("", 2, True)

    def chance(t: int) -> float:
        return mixed((1.0 if t < 2 else 0.75) * (1.0 if t <= 7 else believed(7, t, 100)), 4, believed(0, t, 100))

    assert curves.remaining("", 0, 100) == pytest.approx(sum(map(chance, range(100))), rel=1e-5)


def test_mean_by_hand():
    curves = curves_of(*(("", length, True) for length in (1, 2, 2, 4)))
    # Known outputs have mean 9/4; half a part in 4.5 is what is believed blindly.
    blind = sum(believed(0, t, 10) for t in range(10))
    assert curves.remaining("", 0, 10) == pytest.approx(mixed(9 / 4, 4, blind), rel=1e-5)


def test_mean_is_cut_by_max_tokens():
    curves = curves_of(("", 10, True), ("", 30, True))
    # min(L, 20) - 5 given L > 5: 5 or 15.
    blind = sum(believed(5, 5 + t, 20) for t in range(15))
    assert curves.remaining("", 5, 20) == pytest.approx(mixed(10.0, 2, blind), rel=1e-5)


def test_mean_equals_the_sum_of_survival_above_the_exact_range():
    rng = np.random.default_rng(3)
    curves = curves_of(*(("", int(n), True) for n in rng.geometric(1 / 300, 400)))
    total = sum(survival(curves, 150, list(range(1850)), most=2000))
    assert curves.remaining("", 150, 2000) == pytest.approx(total, rel=1e-4)


def product_limit(outputs: list[tuple[int, bool]], generated: int, until: int, most: int) -> float:
    """P(length > until | length > generated), one length at a time, and as believed beyond the longest."""
    alive = 1.0
    longest = max((n for n, _ended in outputs), default=0)
    for length in range(generated + 1, min(until, longest) + 1):
        at_risk = sum(1 for n, _ended in outputs if n >= length)
        ends = sum(1 for n, ended in outputs if n == length and ended)
        alive *= 1 - ends / at_risk
    return alive if until <= longest else alive * believed(max(longest, generated), until, most)


@settings(max_examples=100, deadline=None)
@given(
    outputs=st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=30),
    running=st.lists(st.integers(0, 45), max_size=8),
    generated=st.integers(0, 45),
    left=st.integers(1, 30),
)
def test_the_tables_equal_the_product_limit_one_length_at_a_time(outputs, running, generated, left):
    curves = curves_of(*(("", length, ended) for length, ended in outputs))
    curves.include_running(np.zeros(len(running), dtype=np.int64), np.array(running, dtype=np.int64), every=1)
    known = outputs + [(length, False) for length in running]
    seen = sum(1 for length, _ended in known if length > generated)
    most = max(2, generated + left)
    expected = [
        mixed(product_limit(known, generated, generated + t, most), seen, believed(generated, generated + t, most))
        for t in range(left)
    ]
    zero = np.zeros(1, dtype=np.int64)
    alive, basis = curves.survival(zero, np.array([generated]), np.array([left]), np.arange(left))
    assert basis[0] == seen
    assert alive[0].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert curves.remaining("", generated, generated + left) == pytest.approx(sum(expected), rel=1e-3)


def test_the_nothing_left_case():
    assert curves_of(("", 3, True)).remaining("", 8, 8) == 0.0


def test_a_weight_halves_every_half_life():
    curves = curves_of(("", 1, True), ("", 2, True), ("", 2, True), half_life=2)
    weights = [0.5, 0.5**0.5, 1.0]
    assert curves.effective_observations() == pytest.approx(sum(weights))
    assert survival(curves, 0, [1]) == pytest.approx(
        [mixed(sum(weights[1:]) / sum(weights), sum(weights), believed(0, 1))], rel=1e-5
    )


def test_weights_survive_many_half_lives():
    curves = curves_of(*(("", 1 + i % 2, True) for i in range(2000)), half_life=4)
    assert np.isfinite(survival(curves, 0, [1])).all()
    assert curves.effective_observations() == pytest.approx(1 / (1 - 2 ** (-1 / 4)))


def test_a_class_shrinks_to_the_model_wide_curve():
    curves = curves_of(("json", 5, True), ("json", 5, True), ("", 50, True), ("", 50, True))
    model_wide = mixed(0.5, 4, believed(0, 5))  # P(L > 5) over all four
    assert survival(curves, 0, [5], "json") == pytest.approx([mixed(0.0, 2, model_wide, CLASS_PRIOR)])


def test_an_unknown_class_is_answered_by_the_model_wide_curve():
    curves = curves_of(("json", 5, True), ("", 9, True))
    assert curves.remaining("other", 1, 100) == curves.remaining("", 1, 100)


def test_classes_are_told_apart_with_enough_observations():
    curves = curves_of(*((name, n, True) for _ in range(200) for name, n in (("short", 5), ("long", 90))))
    assert curves.remaining("short", 0, 500) < 12
    assert curves.remaining("long", 0, 500) > 85


def test_the_least_recently_observed_class_is_forgotten_at_the_bound():
    curves = LengthCurves(max_classes=3)
    for name in ("a", "b", "c", "a", "d"):
        curves.observe(name, 3, True)
    assert [curves.row(name) != 0 for name in "abcd"] == [True, False, True, True]
    assert curves.num_classes == 3
    assert curves.effective_observations("d") == pytest.approx(1.0)  # nothing of b is left in its row


def test_a_thousand_classes_are_the_bound():
    curves = LengthCurves()
    for i in range(1500):
        curves.observe(f"class {i}", 3, True)
    assert curves.num_classes == 1000


def test_shortest_is_the_least_length_that_ended_by_itself():
    curves = curves_of(*(("", length, True) for length in range(7, 207)), ("", 3, False))
    assert curves.shortest("") == 7


def test_shortest_is_one_with_few_observations():
    curves = curves_of(*(("", 70, True) for _ in range(100)), ("json", 70, True))
    assert curves.shortest("") == 70
    assert curves.shortest("json") == curves.shortest("unseen") == LengthCurves().shortest("") == 1


def test_an_output_that_can_only_be_cut_goes_on_for_sure():
    curves = curves_of(("", 2, True), ("", 2, True))
    rows = np.array([NEVER_ENDS, 0])
    curves.include_running(rows, np.array([9, 0]))
    alive, _basis = curves.survival(rows, np.zeros(2, dtype=np.int64), np.full(2, 1000), np.array([1, 5]))
    assert alive.tolist() == [[1.0, 1.0], pytest.approx([1.0, mixed(0.0, 2, believed(0, 5))])]


@pytest.mark.parametrize("name", ["x" * 65, 7, None])
def test_bad_class_names_are_refused(name):
    with pytest.raises(RequestError, match="at most 64 characters") as error:
        validate_class(name)
    assert error.value.param == "request_class"


@pytest.mark.parametrize("name", ["", "x" * 64, "größe 😀"])
def test_good_class_names_are_kept(name):
    assert validate_class(name) == name


def test_saved_curves_answer_the_same(tmp_path):
    rng = np.random.default_rng(5)
    curves = curves_of(
        *((f"c{i % 3}", int(n), i % 7 != 0) for i, n in enumerate(rng.geometric(1 / 200, 600))), half_life=100
    )
    curves.save(tmp_path / "deep" / "curves.json")
    loaded = LengthCurves(100)
    loaded.load(tmp_path / "deep" / "curves.json")
    for name in ("", "c0", "c2", "unseen"):
        assert loaded.remaining(name, 20, 3000) == pytest.approx(curves.remaining(name, 20, 3000), rel=1e-2)
    assert loaded.effective_observations("c1") == pytest.approx(curves.effective_observations("c1"), rel=1e-3)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["curves.json"]


def test_a_missing_file_is_a_blind_start_without_a_word(tmp_path, caplog):
    curves = LengthCurves()
    curves.load(tmp_path / "none.json")
    assert curves.effective_observations() == 0 and caplog.records == []


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{",
        b'{"format": 2, "classes": []}',
        b'{"format": 1, "classes": [["", {"ended": [[3, -1]], "cut": []}]]}',
        b'{"format": 1, "classes": [["", {"ended": [[3, NaN]], "cut": []}]]}',
        b'{"format": 1, "classes": [["", {"ended": [[2.5, 1]], "cut": []}]]}',
        b'{"format": 1, "classes": [["", {"ended": [[3]], "cut": []}]]}',
        b"[" * 100_000,
        b'{"format": 1, "classes": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"format": 1, "classes": [["", {"ended": [[3, 1' + b"0" * 400 + b']], "cut": []}]]}',
        b'{"format": 1, "classes": [["", {"ended": [[3, 1' + b"0" * 9000 + b']], "cut": []}]]}',
        b'{"format": 1, "classes": [["", {"ended": [[3, 1e308], [4, 1e308]], "cut": []}]]}',
        b'{"format": 1, "classes": [["", {"ended": [], "cut": [[3, 1e308], [3, 1e308]]}]]}',
    ],
)
def test_a_damaged_file_is_one_warning_and_a_blind_start(tmp_path, caplog, text):
    path = tmp_path / "curves.json"
    path.write_bytes(text)
    curves = LengthCurves()
    with caplog.at_level(logging.WARNING):
        curves.load(path)
    assert len(caplog.records) == 1 and str(path) in caplog.text
    assert curves.remaining("", 0, 50) == LengthCurves().remaining("", 0, 50)


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    curves_of(("", 3, True)).save(tmp_path / "file" / "curves.json")
    assert len(caplog.records) == 1 and "not saved" in caplog.text


def test_a_full_disk_leaves_the_file_of_before_and_nothing_else(tmp_path, caplog, monkeypatch):
    path = tmp_path / "curves.json"
    curves_of(("", 3, True)).save(path)
    before = path.read_bytes()

    def full(self, text, **_):
        with self.open("w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "write_text", full)
    curves_of(("", 5, True)).save(path)
    assert "No space left" in caplog.text
    assert [p.name for p in tmp_path.iterdir()] == ["curves.json"]
    assert path.read_bytes() == before


def test_the_same_observations_give_the_same_answers():
    observations = [(f"c{i % 4}", 1 + 37 * i % 300, i % 5 != 0) for i in range(500)]
    assert curves_of(*observations).remaining("c1", 9, 400) == curves_of(*observations).remaining("c1", 9, 400)


def test_a_question_costs_microseconds():
    curves = curves_of(*(("", 1 + 37 * i % 3000, True) for i in range(2000)))
    curves.remaining("", 0, 100)

    def ask() -> None:
        for generated in range(1000):
            curves.remaining("", generated, 4000)

    assert seconds_of(ask, runs=3) < 60 * pure_python()  # 60 us each where `pure_python` takes 6 ms
