"""Each sampling parameter against transformers' own processors, and the noise against the distribution it must give."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cb_backend.params import SamplingParams
from cb_backend.request import Request, Timings
from cb_backend.sampling.batch import CONSTRAINT_FAILED, ROW_FAILED, SlotSettings, batch_of
from cb_backend.sampling.host import adjust, draw, keep_top_k, keep_top_p
from cb_backend.sampling.host import sample as sample_batch

VOCAB = 200


def request_with(prompt=(5, 6, 7), output=(), stop_ids=(), bad_words=(), seed=0, **params) -> Request:
    request = Request(
        "r",
        len(prompt),
        [*prompt, *output],
        SamplingParams(**params),
        100,
        frozenset(stop_ids),
        seed,
        Timings(0.0),
        lambda delta: None,
        bad_word_ids=tuple(bad_words),
    )
    request.num_in_flight = 1  # the token in the making
    return request


def random_logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def adjusted(request: Request, row: torch.Tensor) -> torch.Tensor:
    rows = row[None].clone()
    assert adjust(rows, batch_of([request])) == {}
    return rows[0]


def sample(logits: torch.Tensor, requests: list[Request]):
    return sample_batch(logits, batch_of(requests))


def drawn_from(rows: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    return draw(rows, batch_of(requests), range(len(requests)))


def test_repetition_penalty_is_that_of_transformers_over_prompt_and_output():
    request = request_with(prompt=(3, 4), output=(9, 9), repetition_penalty=1.7)
    logits = random_logits()
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 4, 9, 9]]), logits.clone())
    torch.testing.assert_close(adjusted(request, logits[0]), wanted[0], rtol=0, atol=0)


def test_presence_and_frequency_penalties_count_the_output_only():
    request = request_with(prompt=(3, 4), output=(9, 9, 8), presence_penalty=0.5, frequency_penalty=0.25)
    logits = random_logits()
    wanted = logits[0].clone()
    wanted[9] -= 0.5 + 2 * 0.25
    wanted[8] -= 0.5 + 0.25
    torch.testing.assert_close(adjusted(request, logits[0]), wanted)


def test_no_penalty_is_due_before_the_first_token():
    request = request_with(prompt=(3, 4), presence_penalty=0.5, frequency_penalty=0.25)
    logits = random_logits()
    assert torch.equal(adjusted(request, logits[0]), logits[0])


def test_logit_bias_is_added():
    request = request_with(logit_bias={7: 100.0, 8: -100.0})
    logits = random_logits()
    row = adjusted(request, logits[0])
    assert row[7] == logits[0, 7] + 100 and row[8] == logits[0, 8] - 100
    assert torch.equal(row[9:], logits[0, 9:])


def test_min_tokens_masks_every_end_id_until_it_is_reached():
    logits = random_logits()
    early = adjusted(request_with(output=(9, 9), stop_ids=(2, 17), min_tokens=3), logits[0])
    assert early[2] == early[17] == float("-inf")
    later = adjusted(request_with(output=(9, 9, 9), stop_ids=(2, 17), min_tokens=3), logits[0])
    assert torch.equal(later, logits[0])


def test_bad_words_are_those_of_transformers():
    words = [[11], [9, 12], [8, 9, 13]]
    request = request_with(prompt=(3,), output=(8, 9), bad_words=[tuple(w) for w in words])
    logits = random_logits()
    wanted = NoBadWordsLogitsProcessor(words)(torch.tensor([[3, 8, 9]]), logits.clone())
    assert torch.equal(adjusted(request, logits[0]), wanted[0])


@pytest.mark.parametrize("k", [1, 5, 199])
def test_top_k_is_that_of_transformers(k):
    row = random_logits()[0]
    wanted = TopKLogitsWarper(k)(None, row[None].clone())[0]
    keep_top_k(row, k)
    assert torch.equal(row, wanted)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_top_p_is_that_of_transformers(p, spread):
    row = random_logits()[0] * spread
    wanted = TopPLogitsWarper(p)(None, row[None].clone())[0]
    keep_top_p(row, p)
    assert torch.equal(row, wanted)


def test_the_nucleus_may_be_wider_than_the_first_guess():
    row = torch.zeros(5000)
    keep_top_p(row, 0.5)
    assert int((row > float("-inf")).sum()) == 2500


def test_filters_apply_in_the_documented_order():
    """Sampled ids never leave the set that transformers' chain (temperature, top_k, top_p, min_p) keeps."""
    logits = random_logits(seed=4)
    chain = LogitsProcessorList(
        [TemperatureLogitsWarper(0.8), TopKLogitsWarper(30), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)]
    )
    kept = set(torch.nonzero(chain(None, logits.clone())[0] > float("-inf"))[:, 0].tolist())
    drawn = set()
    for seed in range(600):
        request = request_with(seed=seed, temperature=0.8, top_k=30, top_p=0.8, min_p=0.05)
        drawn.add(int(drawn_from(logits.clone(), [request])[0]))
    assert drawn <= kept
    assert len(drawn) > 0.8 * len(kept)


def test_min_p_drops_what_is_far_below_the_best():
    row = torch.tensor([[0.0, -1.0, -2.0, -3.0]])
    drawn = {int(drawn_from(row.clone(), [request_with(seed=s, min_p=0.2)])[0]) for s in range(300)}
    assert drawn == {0, 1}  # exp(-2) < 0.2 <= exp(-1)


def test_frequencies_follow_the_softmax():
    row = torch.tensor([2.0, 1.0, 0.0, -1.0])
    draws = 4000
    ids = drawn_from(row.expand(draws, -1).clone(), [request_with(seed=s) for s in range(draws)])
    share = torch.bincount(ids, minlength=4) / draws
    torch.testing.assert_close(share, row.softmax(0), rtol=0, atol=0.03)


def test_temperature_sharpens_and_flattens():
    row = torch.tensor([1.0, 0.0])
    for temperature in (0.3, 3.0):
        requests = [request_with(seed=s, temperature=temperature) for s in range(4000)]
        share = float((drawn_from(row.expand(4000, -1).clone(), requests) == 0).float().mean())
        assert abs(share - float((row / temperature).softmax(0)[0])) < 0.03


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-8, 1e-6])
def test_tiny_temperatures_are_greedy(temperature):
    logits = random_logits(3)
    sampled = sample(logits.clone(), [request_with(seed=s, temperature=temperature) for s in range(3)])
    assert sampled.token_ids.tolist() == logits.argmax(-1).tolist()
    assert sampled.errors == {}


def test_a_row_does_not_depend_on_its_neighbours():
    logits = random_logits(8, seed=2)
    requests = [request_with(seed=100 + i, temperature=1.0 + i / 10, top_p=0.9 if i % 2 else 1.0) for i in range(8)]
    together = sample(logits.clone(), requests).token_ids.tolist()
    alone = [int(sample(logits[i : i + 1].clone(), [requests[i]]).token_ids[0]) for i in range(8)]
    assert together == alone


def test_a_seed_at_another_position_draws_anew():
    logits = torch.zeros(1, VOCAB)
    ids = {int(sample(logits.clone(), [request_with(output=[9] * n, seed=1)]).token_ids[0]) for n in range(20)}
    assert len(ids) > 10


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_rows_nan_stays_in_its_row(bad):
    logits = random_logits(3)
    logits[1, 5] = bad
    sampled = sample(logits.clone(), [request_with(temperature=t) for t in (0.0, 1.0, 0.0)])
    assert list(sampled.errors) == [1]
    assert sampled.token_ids[0] == logits[0].argmax() and sampled.token_ids[2] == logits[2].argmax()


def test_a_row_with_everything_banned_is_an_error_not_a_choice():
    logits = torch.full((1, VOCAB), float("-inf"))
    assert list(sample(logits, [request_with(temperature=1.0)]).errors) == [0]


class Raises:
    """A grammar that fails."""

    finished, error = False, None

    def allowed(self):
        raise OSError("/home/somebody/secret.txt: no such file")


def test_a_row_that_cannot_be_sampled_fails_alone_with_a_neutral_message():
    logits = random_logits(3)
    beyond = request_with(logit_bias={VOCAB + 7: 5.0})  # refused at the border, so it never comes so far
    sampled = sample(logits.clone(), [request_with(temperature=0.0), beyond, request_with(temperature=0.0)])
    assert sampled.errors == {1: ROW_FAILED}
    assert sampled.token_ids[0] == logits[0].argmax() and sampled.token_ids[2] == logits[2].argmax()


def test_a_grammar_that_raises_leaves_its_row_unmasked_and_is_told_of():
    request = request_with(temperature=0.0)
    request.constraint = Raises()
    settings = SlotSettings(2)
    settings.put(0, request_with(temperature=0.0))
    settings.put(1, request)
    slots, positions = np.array([1, 0]), np.array([3, 3])
    batch, errors = settings.batch(slots, positions, [request, request_with(temperature=0.0)])
    assert errors == {0: CONSTRAINT_FAILED}
    assert len(batch) == 2 and batch.masks is None


def test_a_batch_of_arrays_survives_pickling():
    logits = random_logits(3, seed=7)
    batch = batch_of([request_with(seed=1, top_p=0.9), request_with(presence_penalty=1.0, output=(9,), logprobs=2)])
    again = pickle.loads(pickle.dumps(batch))
    assert sample_batch(logits[:2].clone(), batch).read() == sample_batch(logits[:2].clone(), again).read()


def test_logprobs_are_the_models_own_before_any_filter():
    logits = random_logits(2)
    requests = [
        request_with(temperature=0.5, top_k=1, logit_bias={3: 50.0}, logprobs=4),
        request_with(temperature=0.0),
    ]
    sampled = sample(logits.clone(), requests)
    table = logits[0].log_softmax(-1)
    found = sampled.logprobs[0]
    assert found is not None and sampled.logprobs[1] is None
    assert found.token_id == 3
    assert found.logprob == pytest.approx(float(table[3]), abs=1e-6)
    values, ids = table.topk(4)
    assert [i for i, _ in found.top] == ids.tolist()
    assert [v for _, v in found.top] == pytest.approx(values.tolist(), abs=1e-6)
