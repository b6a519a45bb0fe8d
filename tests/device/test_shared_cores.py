"""How many threads compute while other processes keep cores busy."""

from __future__ import annotations

import logging

import pytest

from cb_backend.device.shared_cores import SharedCores


class Machine:
    """A clock, a number of threads, and steps of 50 ms."""

    def __init__(self, threads: int) -> None:
        self.now = 0.0
        self.threads = threads
        self.cores = SharedCores(lambda: self.threads, self._set)

    def _set(self, threads: int) -> None:
        self.threads = threads

    def steps(self, seconds: float, kept_back: float) -> list[int]:
        """The number of threads in every quarter of a second, in `kept_back` of which one does not run."""
        seen = []
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            self.cores.saw(self.now, 0.25, 0.25 * kept_back)
            seen.append(self.threads)
        return seen


@pytest.mark.parametrize(("threads", "share"), [(2, 0.39), (4, 0.19), (8, 0.09)])
def test_less_than_a_threads_worth_changes_nothing(threads, share):
    assert Machine(threads).steps(10, share) == [threads] * 40


@pytest.mark.parametrize(("threads", "share"), [(2, 0.41), (4, 0.21), (8, 0.11)])
def test_more_than_a_threads_worth_costs_a_thread(threads, share):
    assert Machine(threads).steps(0.25, share) == [threads - 1]


def test_a_thread_is_given_up_at_once_and_all_are_tried_again_after_a_second():
    machine = Machine(2)
    assert machine.steps(0.25, 0.5) == [1]
    assert machine.steps(1.25, 0.0) == [1, 1, 1, 2, 2]


def test_trying_in_vain_waits_twice_as_long_each_time_up_to_eight_seconds():
    machine, waits = Machine(2), []
    for _ in range(6):
        assert machine.steps(0.25, 0.5) == [1]
        began = machine.now
        while machine.steps(0.25, 0.0) == [1]:
            pass
        waits.append(machine.now - began)
    assert waits == [1, 2, 4, 8, 8, 8]


def test_a_success_forgets_what_was_in_vain():
    machine = Machine(2)
    machine.steps(0.25, 0.5)
    machine.steps(1, 0.0)
    machine.steps(0.25, 0.5)  # in vain: two seconds now
    machine.steps(2.25, 0.0)  # tried, and it went well
    assert machine.steps(0.25, 0.5) == [1]
    assert machine.steps(1, 0.0) == [1, 1, 1, 2]


def test_more_are_given_up_one_by_one_and_come_back_together():
    machine = Machine(8)
    assert machine.steps(0.75, 0.5) == [7, 6, 5]
    assert machine.steps(1.25, 0.0)[-1] == 8


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_last_thread_stays(share):
    assert Machine(1).steps(1, share) == [1] * 4


def test_one_slow_step_among_fast_ones_is_no_reason():
    machine = Machine(2)
    for _ in range(20):
        machine.now += 0.01
        machine.cores.saw(machine.now, 0.01, 0.0)
    machine.now += 0.02
    machine.cores.saw(machine.now, 0.02, 0.02)
    assert machine.threads == 2


def test_the_log_says_it_once(caplog):
    machine = Machine(2)
    with caplog.at_level(logging.INFO, "cb_backend"):
        machine.steps(0.25, 0.5)
        machine.steps(1, 0.0)
        machine.steps(0.25, 0.5)
    assert caplog.messages == ["other processes keep cores busy: 1 of 2 threads for a while"]
