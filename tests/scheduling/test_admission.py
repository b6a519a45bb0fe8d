"""Admission: what each policy says to a hand-made situation, and the forecast against an exact enumeration."""

from __future__ import annotations

import math
import time
from itertools import product

import numpy as np
import pytest

from cb_backend.config import AdmissionConfig
from cb_backend.kv.blocks import BlockPool
from cb_backend.params import SamplingParams
from cb_backend.request import FinishReason
from cb_backend.scheduling.admission import Admission
from cb_backend.scheduling.forecast import Moments, Sequences, choose_horizons, forecast, overlap
from cb_backend.scheduling.lengths import NEVER_ENDS, LengthCurves

from .scripted import make_request, make_scheduler, step

FOREVER = 10**9


def make_admission(policy="forecast", num_blocks=20, block_size=4, risk=0.05, lengths=(), pool=None) -> Admission:
    curves = LengthCurves(FOREVER)
    for length in lengths:
        curves.observe("", length, True)
    config = AdmissionConfig(policy=policy, risk=risk)
    return Admission(config, num_blocks, block_size, curves, pool)


def running(name="r", prompt=4, generated=0, max_tokens=16, **fields):
    (request,) = make_request(name, prompt, max_tokens)
    request.token_ids += [5] * generated
    for key, value in fields.items():
        setattr(request, key, value)
    return request


def endless(name="r", prompt=4, generated=0, max_tokens=16, **fields):
    """A running request that can only be cut: its length is known."""
    return running(name, prompt, generated, max_tokens, stop_ids=frozenset(), **fields)


def admits(admission: Admission, others, candidate, new_blocks=None, shared=0) -> bool:
    admission.begin(others)
    blocks = -(-candidate.num_known // admission.block_size) - shared
    return admission.admits(candidate, blocks if new_blocks is None else new_blocks, shared)


# -- worst case and prompt ----------------------------------------------------------------------------------------


def test_worst_case_admits_exactly_what_fits_at_max_tokens():
    # 4 + 16 tokens, of which the last is never stored: 5 blocks each.
    others = [running(str(i)) for i in range(3)]
    assert admits(make_admission("worst_case", 20), others, running("c"))
    assert not admits(make_admission("worst_case", 19), others, running("c"))


def test_worst_case_does_not_store_the_last_token():
    assert admits(make_admission("worst_case", 10), [running(max_tokens=17)], running("c", max_tokens=17))


def test_worst_case_counts_who_joined_in_the_same_round():
    admission = make_admission("worst_case", 10)
    admission.begin([running()])
    assert admission.admits(running("a"), 1, 0)
    admission.add(running("a"), 1)
    assert not admission.admits(running("b"), 1, 0)


def test_prompt_admits_whatever_fits_now():
    others = [running(str(i), max_tokens=4000) for i in range(19)]
    assert admits(make_admission("prompt", 20), others, running("c", max_tokens=4000))


@pytest.mark.parametrize("policy", ["forecast", "worst_case", "prompt"])
def test_an_empty_engine_admits_what_fits_alone(policy):
    candidate = running("c", prompt=80, max_tokens=4000)
    assert admits(make_admission(policy, 20), [], candidate)
    assert not admits(make_admission(policy, 19), [], candidate)


# -- forecast ------------------------------------------------------------------------------------------------------


def test_known_lengths_are_the_worst_case_in_time():
    # Everybody runs to max_tokens for sure: 5 blocks each at the same moment.
    others = [endless(str(i)) for i in range(3)]
    assert admits(make_admission(num_blocks=20), others, endless("c"))
    assert not admits(make_admission(num_blocks=19), others, endless("c"))


def test_the_forecast_sees_that_one_ends_before_the_other_grows():
    # The old one ends one step from now with 5 blocks; then the candidate has 2 and grows to 5.
    old = endless("old", generated=15)
    assert admits(make_admission(num_blocks=6), [old], endless("c"))
    assert not admits(make_admission("worst_case", num_blocks=6), [old], endless("c"))


def test_an_output_that_cannot_end_by_itself_is_forecast_to_max_tokens():
    lengths = [2] * 1000
    others = [endless(str(i), max_tokens=40) for i in range(2)]
    assert not admits(make_admission(num_blocks=30, lengths=lengths), others, endless("c", max_tokens=40))
    others = [running(str(i), max_tokens=40) for i in range(2)]
    assert admits(make_admission(num_blocks=30, lengths=lengths), others, running("c", max_tokens=40))


def test_known_short_outputs_admit_more_than_the_worst_case():
    others = [running(str(i), max_tokens=100) for i in range(8)]
    assert admits(make_admission(num_blocks=24, lengths=[4] * 500), others, running("c", max_tokens=100))
    assert not admits(make_admission("worst_case", num_blocks=24), others, running("c", max_tokens=100))


def test_a_smaller_risk_admits_less():
    lengths = list(range(1, 101)) * 5
    others = [running(str(i), max_tokens=200) for i in range(10)]

    def most_blocks_refused(risk: float) -> int:
        refused = [
            n
            for n in range(10, 400)
            if not admits(make_admission(num_blocks=n, risk=risk, lengths=lengths), others, running("c"))
        ]
        return refused[-1]

    needs = [most_blocks_refused(risk) for risk in (0.2, 0.05, 0.01)]
    assert needs == sorted(set(needs))


def test_few_observations_are_trusted_less_than_many():
    others = [running(str(i), max_tokens=100) for i in range(8)]
    assert not admits(make_admission(num_blocks=24, lengths=[4] * 3), others, running("c", max_tokens=100))
    assert admits(make_admission(num_blocks=24, lengths=[4] * 300), others, running("c", max_tokens=100))


def test_who_joined_is_counted_in_the_same_round():
    admission = make_admission(num_blocks=11)
    admission.begin([endless()])
    assert admission.admits(endless("a"), 1, 0)
    admission.add(endless("a"), 1)
    assert not admission.admits(endless("b"), 1, 0)


def test_adding_without_asking_counts_as_well():
    admission = make_admission(num_blocks=11)
    admission.begin([endless()])
    admission.add(endless("a"), 1)
    assert not admission.admits(endless("b"), 1, 0)


def test_a_burst_into_an_idle_engine_is_forecast_like_any_other():
    admission = make_admission(num_blocks=10)  # each takes 1 block now and 5 in the end
    admission.begin([])
    admission.add(endless("first"), 1)
    assert admission.admits(endless("second"), 1, 0)
    admission.add(endless("second"), 1)
    assert not admission.admits(endless("third"), 1, 0)


def test_it_is_looked_ahead_as_far_as_a_candidate_goes_on():
    admission = make_admission(num_blocks=15)  # the one that runs ends in 2 steps; each of the others needs 11 blocks
    admission.begin([endless(generated=14)])
    assert admission.admits(endless("a", max_tokens=40), 1, 0)
    admission.add(endless("a", max_tokens=40), 1)
    assert not admission.admits(endless("b", max_tokens=40), 1, 0)
    assert admission.admits(endless("c", max_tokens=3), 1, 0)


def test_who_joined_still_counts_when_it_is_looked_further_ahead():
    # 7 steps from now the two that joined have 3 blocks each, and the candidate, which goes on alone to 14, has 11.
    for joined, admitted in (("", True), ("ab", False)):
        admission = make_admission(num_blocks=15)
        admission.begin([endless(generated=14)])
        for name in joined:
            assert admission.admits(endless(name, max_tokens=8), 1, 0)
            admission.add(endless(name, max_tokens=8), 1)
        assert admission.admits(endless("c", prompt=36, max_tokens=20), 9, 0) is admitted


def test_choices_of_one_prompt_count_as_sequences_that_share_it():
    # Each grows to 18 stored tokens, 5 blocks, of which 2 are the shared prompt: 5 + 3 + 3, and 5 of another request.
    pool = BlockPool(40, 4)
    prompt = pool.allocate(2)
    first, second, third = make_request("n3", 9, 10, n=3, stop_ids=frozenset())
    other = endless(prompt=8, max_tokens=10)
    first.blocks, second.blocks = [*prompt, *pool.allocate(1)], [*prompt, *pool.allocate(1)]
    other.blocks = pool.allocate(2)
    pool.share(prompt)
    for policy in ("forecast", "worst_case"):
        assert admits(make_admission(policy, 16, pool=pool), [first, second, other], third, 1, shared=2)
        assert not admits(make_admission(policy, 15, pool=pool), [first, second, other], third, 1, shared=2)


@pytest.mark.parametrize("policy", ["forecast", "worst_case"])
def test_shared_blocks_count_once(policy):
    pool = BlockPool(20, 4)
    prefix = pool.allocate(8)
    others = [endless(str(i), prompt=33, max_tokens=4) for i in range(2)]
    for request in others:
        request.blocks = [*prefix, *pool.allocate(1)]
    pool.share(prefix)
    # 8 shared, one private block of 36 tokens each, and a candidate of 8 shared and one private: 11 of 20.
    candidate = endless("c", prompt=33, max_tokens=4)
    assert admits(make_admission(policy, 11, pool=pool), others, candidate, 1, shared=8)
    assert not admits(make_admission(policy, 10, pool=pool), others, candidate, 1, shared=8)


def test_a_block_shared_with_one_request_outlives_it():
    # The owner of 8 blocks ends in this step; the candidate keeps the 7 that it shares and grows to 12 blocks, while
    # a third request grows to 12 as well.
    pool = BlockPool(40, 4)
    owner, third = endless("owner", prompt=31, max_tokens=1), endless("third", prompt=29, max_tokens=20)
    owner.blocks, third.blocks = pool.allocate(8), pool.allocate(8)
    candidate = endless("c", prompt=29, max_tokens=20)
    assert admits(make_admission(num_blocks=24, pool=pool), [owner, third], candidate, 1, shared=7)
    assert not admits(make_admission(num_blocks=20, pool=pool), [owner, third], candidate, 1, shared=7)


def test_mean_variance_and_third_moment_equal_an_enumeration():
    curves = LengthCurves(FOREVER)
    for length in (3, 5, 5, 9, 14):
        curves.observe("", length, True)
    known, generated, left = np.array([6, 9, 5]), np.array([2, 0, 4]), np.array([20, 8, 30])
    rows, shared = np.array([0, 0, NEVER_ENDS]), np.array([0, 1, 0])
    horizons = np.array([0, 1, 4, 9])
    curves.include_running(rows, generated)
    alive, _basis = curves.survival(rows, generated, left, horizons)
    moments = forecast(Sequences(known, generated, left, rows, shared), horizons, curves, 4)
    for h, t in enumerate(horizons.tolist()):
        chances = [float(alive[j, h]) * (t < left[j]) for j in range(3)]
        blocks = [-(-(int(known[j]) + t) // 4) - int(shared[j]) for j in range(3)]
        outcomes = []
        for states in product((0, 1), repeat=3):
            weight = np.prod([p if s else 1 - p for s, p in zip(states, chances, strict=True)])
            outcomes.append((sum(b * s for b, s in zip(blocks, states, strict=True)), weight))
        mean = sum(u * w for u, w in outcomes)
        central = [sum((u - mean) ** k * w for u, w in outcomes) for k in (2, 3)]
        assert moments.table[:3, h].tolist() == pytest.approx([mean, *central], rel=1e-4, abs=1e-4)
        assert moments.alive[h] == pytest.approx(sum(chances), rel=1e-5)


@pytest.mark.parametrize("risk, z", [(0.2, 0.8416), (0.05, 1.6449), (0.01, 2.3263)])
def test_the_quantile_covers_a_binomial_use(risk, z):
    # 30 sequences of one block, each still there with probability 0.3: Cornish-Fisher is within one block.
    p, n = 0.3, 30
    table = np.array(
        [[n * p], [n * p * (1 - p)], [n * p * (1 - p) * (1 - 2 * p)], [0.0], [0.0], [n * p]], dtype=np.float32
    )
    draws = np.random.default_rng(0).binomial(n, p, 200_000)
    assert abs(Moments(table).quantile(z)[0] - np.quantile(draws, 1 - risk)) <= 1.0


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_the_uncertainty_of_the_curves_counts_as_far_as_two_outputs_share_it(part):
    # Two outputs with variances of 8, and with standard deviations of 2 by the curves: their covariance is 2 x 2 x 2.
    table = np.array([[10.0], [16.0], [0.0], [4.0], [8.0], [2.0]], dtype=np.float32)
    moments = Moments(table)
    expected = 10.0 + math.sqrt(16.0 + part * (4.0**2 - 8.0))
    assert moments.quantile(1.0, part)[0] == pytest.approx(expected)
    assert moments.quantile(1.0, np.array([part], dtype=np.float32))[0] == pytest.approx(expected)


def test_outputs_overlap_as_the_mean_over_their_pairs():
    generated = np.arange(400)
    apart = np.abs(generated[:, None] - generated)
    for t, part in zip((1, 40, 200, 400, 900), overlap(generated, np.array([1, 40, 200, 400, 900])), strict=True):
        assert part == pytest.approx(np.maximum(0.0, 1.0 - apart / t).mean(), abs=3e-3)


@pytest.mark.parametrize("generated", [[], [7], [7, 7, 7]])
def test_outputs_at_one_place_share_all_that_is_long(generated):
    assert overlap(np.array(generated, dtype=np.int64), np.array([0, 1, 1000])).tolist() == pytest.approx(
        [0.0, 2 / 3, 1.0], abs=1e-3
    )


def test_horizons_begin_now_and_end_before_the_last_end():
    horizons = choose_horizons(50.0, np.array([10, 400]))
    assert horizons[0] == 0 and horizons[-1] == 399 and 9 in horizons
    assert (np.diff(horizons) > 0).all() and len(horizons) < 60


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the running sets whose use was summed up."""
    made: list[int] = []
    summed_up = Admission._begin_forecast
    monkeypatch.setattr(
        Admission, "_begin_forecast", lambda self, *everything: made.append(1) or summed_up(self, *everything)
    )
    return made


def test_a_round_without_a_question_costs_no_sum(sums):
    make_admission().begin([running()])
    assert sums == []


def test_the_same_question_is_calculated_again_after_eight_rounds(sums):
    admission, others, candidate = make_admission(num_blocks=5), [endless()], endless("c")
    answers = [admits(admission, others, candidate) for _ in range(17)]
    assert answers == [False] * 17 and len(sums) == 3


def test_a_refusal_is_forgotten_when_somebody_leaves_or_another_asks(sums):
    others = [endless(str(i)) for i in range(3)]
    admission, candidate = make_admission(num_blocks=15), endless("c")
    assert not admits(admission, others, candidate)
    assert admits(admission, others[:2], candidate)
    assert not admits(admission, others, candidate)
    assert admits(admission, others, endless("small", prompt=1, max_tokens=1))
    assert len(sums) == 4


def test_who_replaced_another_counts_as_another_running_set(sums):
    admission, candidate = make_admission(num_blocks=10), endless("c")
    assert not admits(admission, [endless("a"), endless("b")], candidate)
    assert admits(admission, [endless("a", max_tokens=1), endless("b", max_tokens=1)], candidate)
    assert len(sums) == 2


# -- observing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reason, known", [(FinishReason.STOP, 0.0), (FinishReason.LENGTH, 1.0), (FinishReason.ABORT, 1.0)]
)
def test_only_an_output_that_ended_by_itself_is_an_observed_length(reason, known):
    admission = make_admission()
    admission.finished(running(generated=3, finish_reason=reason))
    admission.curves.include_running(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    zero = np.zeros(1, dtype=np.int64)
    alive, _basis = admission.curves.survival(zero, zero, np.array([16]), np.array([3]))
    blind = math.log(16 / 3) / math.log(16)
    assert alive[0].tolist() == pytest.approx([(known + 0.5 * blind) / 1.5])


def test_an_output_that_cannot_end_by_itself_is_no_observation():
    admission = make_admission()
    admission.finished(running(generated=3, stop_ids=frozenset(), finish_reason=FinishReason.LENGTH))
    assert admission.curves.effective_observations() == 0


def test_a_class_learns_from_its_requests():
    admission = make_admission()
    admission.finished(running(generated=3, request_class="json", finish_reason=FinishReason.STOP))
    assert admission.curves.effective_observations("json") == pytest.approx(1.0)


# -- bounds --------------------------------------------------------------------------------------------------------


def test_the_same_state_gets_the_same_answer():
    lengths = [1 + 37 * i % 200 for i in range(500)]
    others = [running(str(i), generated=i, max_tokens=300) for i in range(30)]
    answers = [
        [
            admits(make_admission(num_blocks=n, lengths=lengths), others, running("c", max_tokens=300))
            for n in range(300, 900, 9)
        ]
        for _ in range(2)
    ]
    assert answers[0] == answers[1] and set(answers[0]) == {False, True}


def test_a_thousand_running_requests_cost_milliseconds():
    admission = make_admission(num_blocks=10**6, lengths=[1 + 37 * i % 2000 for i in range(2000)])
    others = [running(str(i), prompt=20, generated=i % 500, max_tokens=4000) for i in range(1000)]
    candidate = running("c", max_tokens=4000)
    admission.begin(others)
    begin = min(_seconds(lambda: admission.begin(others)) for _ in range(7))
    ask = min(_seconds(lambda: admission.admits(candidate, 1, 0)) for _ in range(50))
    assert begin < 15e-3  # 1.3 ms on an idle core
    assert ask < 1.5e-3  # 0.13 ms


def _seconds(call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def test_the_scheduler_runs_with_each_policy():
    for policy in ("forecast", "worst_case", "prompt"):
        admission = make_admission(policy, num_blocks=16)
        scheduler = make_scheduler(16, 4, admission=admission)
        admission.pool = scheduler.pool
        for i in range(12):
            for choice in make_request(f"{policy}{i}", 1 + i, 6, n=1 + i % 2, params=SamplingParams(max_tokens=6)):
                scheduler.add(choice)
        for _ in range(200):
            if not scheduler.has_work:
                break
            step(scheduler)
        assert not scheduler.has_work


def test_scoring_requests_that_generate_nothing_can_be_forecast():
    scoring = running(max_tokens=0)
    assert admits(make_admission(lengths=[5] * 20), [scoring], running("next", max_tokens=0))
