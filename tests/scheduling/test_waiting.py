"""What ended requests leave in the queue and among the deadlines: a bounded number of small entries, none when idle."""

from __future__ import annotations

import gc
import random

import pytest

from cb_backend.request import FinishReason, Request
from cb_backend.scheduling.waiting import Deadlines, WaitingQueue

from .scripted import make_request, make_scheduler


def request_of(name, priority=0, deadline=None):
    [request] = make_request(name, [1, 2, 3], 4, priority=priority)
    request.deadline = deadline
    return request


def reachable(root):
    """The ids of the objects that `root` keeps alive in its own containers; requests are not looked into."""
    seen, todo = set(), [root]
    while todo:
        for other in gc.get_referents(todo.pop()):
            if id(other) not in seen and not isinstance(other, type):
                seen.add(id(other))
                if not isinstance(other, Request):
                    todo.append(other)
    return seen


def test_the_ended_behind_a_better_rank_are_forgotten():
    queue = WaitingQueue()
    first = request_of("first", priority=-1)
    queue.push(first)
    others = [request_of(f"r{i}") for i in range(1000)]
    for request in others:
        queue.push(request)
    for request in others:
        queue.leave(request)
        assert queue.num_entries <= 2 * len(queue)
    assert queue.head() is first and len(queue) == 1 and queue.num_entries <= 2


def test_an_entry_does_not_keep_an_ended_request():
    queue = WaitingQueue()
    live = [request_of(f"l{i}") for i in range(10)]
    for request in live:
        queue.push(request)
    ended = request_of("ended", priority=1)
    queue.push(ended)
    queue.leave(ended)
    assert queue.num_entries == 11  # its entry is still there
    assert id(ended) not in reachable(queue)
    assert id(live[0]) in reachable(queue)


def test_order_survives_leaving_and_coming_back():
    rng = random.Random(3)
    queue, waiting = WaitingQueue(), {}
    for i in range(2000):
        act = rng.random()
        if act < 0.5 or not waiting:
            request = request_of(f"r{i}", priority=rng.randrange(4))
            queue.push(request)
            waiting[request.seq_id] = request
        elif act < 0.8:
            request = rng.choice(list(waiting.values()))
            queue.leave(waiting.pop(request.seq_id))
        else:
            head = queue.head()
            assert head is min(waiting.values(), key=lambda r: (r.priority, not r.preempted, r.order, r.index))
            queue.pop()
            head.preempted = True
            if rng.random() < 0.5:
                queue.push(head)
            else:
                del waiting[head.seq_id]
        assert len(queue) == len(waiting)


def test_deadlines_of_the_ended_are_forgotten():
    deadlines = Deadlines()
    requests = [request_of(f"r{i}", deadline=1e9 + i) for i in range(1000)]
    for request in requests:
        deadlines.add(request)
    for request in requests:
        deadlines.leave(request)
        assert deadlines.num_entries <= 2 * len(deadlines)
    assert len(deadlines) == deadlines.num_entries == 0


def test_passed_deadlines_come_in_order_and_once():
    deadlines = Deadlines()
    a, b, c = (request_of(name, deadline=at) for name, at in (("a", 3.0), ("b", 1.0), ("c", 2.0)))
    for request in (a, b, c):
        deadlines.add(request)
    deadlines.leave(c)
    assert list(deadlines.passed(2.5)) == [b.seq_id]
    assert list(deadlines.passed(3.0)) == [a.seq_id]
    assert list(deadlines.passed(9.0)) == []


def test_the_idle_check_sees_a_deadline_that_stayed():
    scheduler = make_scheduler()
    request = request_of("r", deadline=1e9)
    scheduler.add(request)
    scheduler.finish(request, FinishReason.ABORT)
    scheduler.check()
    scheduler._deadlines.add(request)
    with pytest.raises(RuntimeError, match="1 deadlines"):
        scheduler.check()
