"""Steps become smaller when the device has no memory for one, and grow back."""

from __future__ import annotations

from cb_backend.scheduling.limits import GROW_AFTER, StepLimits
from tests.scheduling.scripted import make_request, make_scheduler, step


def test_prompt_tokens_are_halved_before_sequences():
    scheduler = make_scheduler(budget=16)
    scheduler.add(*make_request("a", 12, 3))
    scheduler.add(*make_request("b", 1, 3))
    plan = scheduler.plan()
    limits = StepLimits()
    assert limits.shrink(plan)
    assert (limits.prefill(16), limits.sequences(8)) == (6, 8)


def test_sequences_are_halved_where_no_prompt_is_computed():
    scheduler = make_scheduler(budget=16)
    for name in "abcd":
        scheduler.add(*make_request(name, 2, 3))
    step(scheduler)
    limits = StepLimits()
    assert limits.shrink(scheduler.plan())
    assert (limits.prefill(16), limits.sequences(8)) == (16, 2)


def test_one_token_of_one_sequence_cannot_be_smaller():
    scheduler = make_scheduler()
    scheduler.add(*make_request("a", 1, 3))
    assert not StepLimits().shrink(scheduler.plan())


def test_limits_double_after_so_many_steps_that_succeed():
    scheduler = make_scheduler(budget=16)
    scheduler.add(*make_request("a", 12, 3))
    limits = StepLimits()
    limits.shrink(scheduler.plan())
    for _ in range(GROW_AFTER - 1):
        limits.grow()
    assert limits.prefill(100) == 6
    limits.grow()
    assert limits.prefill(100) == 12
