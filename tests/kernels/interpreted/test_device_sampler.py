"""The batch sampler's rules, row by row against the sampler of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cb_backend.params import SamplingParams
from cb_backend.request import Request, Timings
from cb_backend.sampling.batch import batch_of
from cb_backend.sampling.device import DeviceSampler
from cb_backend.sampling.host import NO_FINITE_SCORE, sample

VOCAB = 96
CPU = torch.device("cpu")


class Allows:
    """A grammar that allows these tokens; None: every token."""

    finished, error = False, None

    def __init__(self, tokens: list[int] | None) -> None:
        self.tokens = tokens

    def allowed(self) -> torch.Tensor | None:
        if self.tokens is None:
            return None
        words = [0] * (VOCAB // 32)
        for token in self.tokens:
            words[token // 32] |= 1 << token % 32
        return torch.tensor([word - 2**32 if word >= 2**31 else word for word in words], dtype=torch.int32)


def request(output: tuple[int, ...] = (), constraint: Allows | None = None, **changes: Any) -> Request:
    stop_ids = frozenset(changes.pop("stop_ids", ()))
    bad_words = tuple(changes.pop("bad_words", ()))
    made = Request(
        "r",
        3,
        [5, 6, 7, *output],
        SamplingParams(**changes),
        100,
        stop_ids,
        changes.get("seed", 0),
        Timings(0.0),
        print,
    )
    made.bad_word_ids, made.constraint, made.num_in_flight = bad_words, constraint, 1
    return made


ROWS = [
    request(temperature=0.0),
    request(seed=3, logit_bias={1: 50.0}, logprobs=3),
    request((9, 9, 8), temperature=0.0, presence_penalty=2.0, frequency_penalty=1.5, repetition_penalty=1.9),
    request((4,), temperature=0.0, logit_bias={2: 90.0, 3: 91.0}, bad_words=((3,), (4, 2), (5, 1))),
    request(temperature=0.0, logit_bias={11: 80.0}, stop_ids={11}, min_tokens=2, logprobs=0),
    request(temperature=0.0, constraint=Allows([40, 41, 77])),
    request(temperature=0.0, constraint=Allows([31, 32]), logit_bias={32: 60.0}, stop_ids={32}, min_tokens=1),
    request(temperature=0.0, constraint=Allows([95]), stop_ids={95}, min_tokens=1),
    request(temperature=0.0, constraint=Allows(None), bad_words=((12,),), logit_bias={12: 70.0}),
    request(seed=8, temperature=1.4, top_k=9, min_p=0.01),
]


def logits() -> torch.Tensor:
    return torch.randn(len(ROWS), VOCAB, generator=torch.Generator().manual_seed(1)) * 3


def test_a_mixed_batch_gives_what_the_cpu_gives() -> None:
    ids, logprobs, errors = DeviceSampler(CPU)(logits(), batch_of(ROWS)).read()
    due, due_logprobs, _ = sample(logits(), batch_of(ROWS)).read()
    assert list(ids) == list(due)
    assert errors == {}
    assert [p and (p.token_id, [i for i, _ in p.top]) for p in logprobs] == [
        p and (p.token_id, [i for i, _ in p.top]) for p in due_logprobs
    ]
    assert [ids[1], ids[6], ids[7]] == [1, 31, 95]
    assert ids[3] not in (2, 3) and ids[4] != 11 and ids[5] in (40, 41, 77) and ids[8] != 12


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_a_row_without_a_finite_best_fails_alone(spoilt: float) -> None:
    rows = logits()
    rows[0, 5] = spoilt
    ids, _, errors = DeviceSampler(CPU)(rows, batch_of(ROWS)).read()
    assert errors == {0: NO_FINITE_SCORE}
    assert list(ids[1:]) == sample(logits(), batch_of(ROWS)).read()[0][1:]


def test_a_row_in_which_everything_is_forbidden_fails_alone() -> None:
    rows = logits()
    rows[2] = float("-inf")
    assert DeviceSampler(CPU)(rows, batch_of(ROWS)).read()[2] == {2: NO_FINITE_SCORE}
