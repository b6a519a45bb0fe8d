"""Requests, blocks and tensors belong to the engine thread: what other threads read is its snapshot."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cb_backend import Engine, SamplingParams
from cb_backend.config import AdmissionConfig
from cb_backend.engine.core import AddMessage, EngineCore
from cb_backend.engine.thread_guard import WrongThreadError
from cb_backend.errors import RequestError
from cb_backend.kv.blocks import BlockPool, HostPool
from cb_backend.scheduling.admission import Admission
from cb_backend.scheduling.lengths import LengthCurves
from cb_backend.scheduling.preemption import CostModel, Preemption
from cb_backend.scheduling.scheduler import Scheduler
from cb_backend.telemetry.metrics.collector import Metrics
from tests.engine.test_core import Reader, ScriptedExecutor, ask
from tests.scheduling.scripted import make_request

BLOCKS, BLOCK_SIZE = 64, 4


def make_core(gate: threading.Semaphore | None = None, **options) -> EngineCore:
    pool, host = BlockPool(BLOCKS, BLOCK_SIZE), HostPool(8)
    admission = Admission(AdmissionConfig(), BLOCKS, BLOCK_SIZE, LengthCurves(), pool)
    preemption = Preemption(pool, host, "auto", CostModel(1e-4, 1e-4))
    scheduler = Scheduler(pool, host, admission, preemption, max_num_batched_tokens=16, max_num_seqs=8)
    return EngineCore(scheduler, ScriptedExecutor(gate=gate), admission=admission, **options)


@pytest.mark.parametrize(
    "name",
    [
        "Scheduler",
        "BlockPool",
        "HostPool",
        "WaitingQueue",
        "Preemption",
        "Admission",
        "LengthCurves",
        "Reserve",
        "Request",
    ],
)
def test_another_thread_that_touches_is_named_with_what_it_touched(name):
    gate = threading.Semaphore(0)
    core = make_core(gate)
    scheduler = core.scheduler
    admission = scheduler.admission
    (request,) = make_request("r", 4, 20)
    objects = {
        "Scheduler": (scheduler, "running"),
        "BlockPool": (scheduler.pool, "num_used"),
        "HostPool": (scheduler.host, "num_used"),
        "WaitingQueue": (scheduler.waiting, "head"),
        "Preemption": (scheduler.preemption, "cost"),
        "Admission": (admission, "num_blocks"),
        "LengthCurves": (admission.curves, "num_observed"),
        "Reserve": (admission.reserve, "z"),
        "Request": (request, "token_ids"),
    }
    touched, attribute = objects[name]
    core.send(AddMessage([request]))
    getattr(touched, attribute)  # before the thread runs, its builder may touch
    core.start()
    try:
        with pytest.raises(WrongThreadError) as raised:
            getattr(touched, attribute)
        with pytest.raises(WrongThreadError):
            setattr(touched, attribute, None)
        for word in (f"{name}.{attribute}", threading.current_thread().name, "cb-engine"):
            assert word in str(raised.value)
        gate.release(10**6)
        core.call(lambda: getattr(touched, attribute))
    finally:
        gate.release(10**6)
        core.stop()
    getattr(touched, attribute)  # and after it has ended


def test_without_the_variable_nothing_is_guarded(monkeypatch):
    monkeypatch.setenv("CB_DEBUG_THREADS", "0")
    core = make_core()
    assert type(core.scheduler) is Scheduler and type(core.scheduler.pool) is BlockPool
    (request,) = make_request("r", 4, 2)
    kind = type(request)
    core.send(AddMessage([request]))
    assert type(request) is kind


def test_whoever_knows_of_an_end_finds_it_in_the_snapshot():
    core = make_core()
    seen = []
    core.start()
    for i in range(50):
        reader = Reader()
        (request,) = make_request(f"r{i}", 4, 3)

        def sink(delta, reader=reader):
            if delta.finish_reason is not None:
                seen.append(core.stats()["finished_length"])
            reader(delta)

        request.sink = sink
        core.send(AddMessage([request]))
        reader.all()
    core.stop()
    assert seen == list(range(1, 51))


def test_what_is_sent_counts_as_waiting_at_once_and_what_is_admitted_no_more():
    gate = threading.Semaphore(0)
    core = make_core(gate)
    readers = [ask(core, f"r{i}", 4, 3) for i in range(3)]
    assert core.num_waiting == core.stats()["waiting"] == 3
    core.start()
    until = time.monotonic() + 10
    while core.num_waiting and time.monotonic() < until:  # they are admitted before their first step is done
        time.sleep(0.001)
    assert core.num_waiting == 0 and core.stats()["running"] == 3
    readers += [ask(core, f"s{i}", 4, 3) for i in range(5)]
    assert core.num_waiting == 5
    gate.release(10**6)
    for reader in readers:
        reader.all()
    assert core.num_waiting == 0
    core.stop()


def test_two_hundred_streams_with_refusals_stats_and_scrapes(tiny_llama):
    """Every access to what the engine thread owns raises here, in whichever thread it happens."""
    params = SamplingParams(max_tokens=6, ignore_eos=True)

    async def one(engine, i):
        reason = None
        async for output in engine.stream(
            [5 + i % 90] * (1 + i % 20), params, request_class=f"c{i % 3}", timeout=200.0
        ):
            reason = output.finish_reason
        return reason

    async def flood(engine, until):
        waves = []
        for wave in range(4):
            waves += [asyncio.create_task(one(engine, 50 * wave + i)) for i in range(50)]
            await asyncio.sleep(0.05)
        results = await asyncio.gather(*waves, return_exceptions=True)
        until.set()
        return results

    with Engine(
        model=str(tiny_llama), dtype="float32", num_kv_blocks=40, block_size=8, max_num_seqs=4, max_queue_size=20
    ) as engine:
        done = threading.Event()
        registry = CollectorRegistry()
        metrics = Metrics("tiny", engine.stats(), registry)
        failures = []

        def watch(read):
            try:
                while not done.is_set():
                    read()
                    time.sleep(0.001)
            except Exception as error:
                failures.append(error)

        def scrape():
            metrics.refresh(engine.stats())
            generate_latest(registry)

        reads = [engine.stats, scrape, lambda: engine.telemetry.recorder.snapshot(), lambda: engine.is_idle]
        threads = [threading.Thread(target=watch, args=(read,)) for read in reads]
        for thread in threads:
            thread.start()
        try:
            results = asyncio.run(flood(engine, done))
        finally:
            done.set()
            for thread in threads:
                thread.join(10)
        stats = engine.stats()
    assert failures == []
    refused = [r for r in results if isinstance(r, RequestError)]
    assert refused and {r.code for r in refused} == {"queue_full"}
    assert results.count("length") == 200 - len(refused) == stats["finished_length"]
    assert stats["kv_blocks_used"] == stats["running"] == stats["waiting"] == 0
